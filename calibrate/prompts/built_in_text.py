"""The package's own retention text: a file for each text domain, all of it written for this use."""

from pathlib import Path

BUILT_IN = Path(__file__).parent / "text"


def built_in_domains() -> frozenset[str]:
    """The names of the text domains that come with the package."""
    return frozenset(path.stem for path in BUILT_IN.glob("*.txt"))
