"""Words of which the built-in task makes its facts."""


def _words(text: str) -> list[str]:
    return text.split()


ADJECTIVES = _words("""
amber ancient autumn bitter bold brave bright broken calm clever cold copper cosmic crimson
curious damp dark distant dusty early eager faint fancy gentle golden green happy heavy hidden
hollow honest icy idle ivory jolly late lively lonely lucky misty modern muddy narrow noble old
pale patient plain proud purple quick quiet rapid rough royal shy silent silver smooth snowy solar
steep tender wild
""")  # fmt: skip
NOUNS = _words("""
anchor apple arrow badge basket beacon bell bottle bridge brush bucket button cabin candle canvas
carpet castle chain circle clock cloud coin compass crown curtain desk door drum engine feather
fence flag flute forest fountain garden glove hammer harbor helmet island jacket kettle key ladder
lamp lantern letter mirror mountain needle orchard paddle pencil piano pillow ribbon river saddle
shell table tower window wheel
""")  # fmt: skip
FIRST_NAMES = _words("""
Ada Agnes Albert Alice Amos Anna Arthur Beth Boris Carla Carlos Clara Daniel David Diana Edgar
Edith Elena Emil Emma Eric Esther Felix Flora Frank Fred George Gloria Grace Greta Hans Harriet
Helen Henry Hugo Ida Irene Isaac Ivan Jack James Jane Jonas Julia Karl Kate Laura Leo Linda Louis
Lucy Marco Maria Martin Maya Nina Nora Oscar Paul Peter Rosa Ruth Simon Vera
""")  # fmt: skip
LAST_NAMES = _words("""
Abbott Adams Bailey Baker Barnes Bell Bennett Bishop Black Booth Brooks Brown Carter Chapman Clark
Cole Collins Cook Cooper Cox Davis Dixon Ellis Evans Fisher Foster Fox Gibson Grant Gray Green
Hall Harris Hart Hill Holmes Hughes Hunt Jones Kelly King Knight Lane Lee Lewis Marsh Mason Moore
Morgan Murray Palmer Parker Porter Price Reed Ross Shaw Stone Turner Walker Ward Watson White
Young
""")  # fmt: skip
TOWNS = _words("""
Aberdeen Athens Austin Bergen Berlin Bern Boston Bristol Cairo Calgary Cambridge Cardiff Chester
Cologne Cork Dallas Delhi Denver Dover Dublin Durham Essen Exeter Florence Geneva Genoa Ghent
Glasgow Granada Hamburg Helsinki Kyoto Lagos Leeds Leipzig Lima Lincoln Lisbon London Lyon Madrid
Malaga Milan Munich Naples Nice Odessa Oslo Oxford Paris Perth Porto Prague Riga Rome Seville
Sofia Stockholm Sydney Tokyo Turin Venice Vienna York
""")  # fmt: skip
