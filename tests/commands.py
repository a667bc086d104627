"""Commands, as the command line runs them."""

from typer.testing import CliRunner

from calibrate.cli.main import app


def call(*arguments, code=0):
    """The result of a command that ends with this exit code."""
    result = CliRunner().invoke(app, [str(a) for a in arguments])
    assert result.exit_code == code, result.output + repr(result.exception)
    return result


def refusal(*arguments, code=1):
    """The one line that a failing command says last."""
    result = call(*arguments, code=code)
    assert result.stdout == ""
    assert "Traceback" not in result.stderr
    return result.stderr.strip().splitlines()[-1]
