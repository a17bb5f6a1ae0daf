"""One spelling for answers that differ in typing only, and the reading of plain numbers."""

from __future__ import annotations

import re
import unicodedata
from dataclasses import dataclass
from fractions import Fraction

_SYMBOLS = str.maketrans(
    {"−": "-", "×": "*", "⋅": "*", "·": "*", "÷": "/", "⁄": "/", "π": r"\pi ", "√": r"\sqrt", "∞": r"\infty "}
)
_SUPERSCRIPTS = str.maketrans("⁰¹²³⁴⁵⁶⁷⁸⁹⁻", "0123456789-")
_WRAPPERS = (("$$", "$$"), ("$", "$"), (r"\(", r"\)"), (r"\[", r"\]"), ("**", "**"), ("__", "__"), ("`", "`"))
_DOLLAR = "\uff04"  # stands for a written dollar sign while the delimiters are peeled
_QUOTES = "\"'“”‘’"
_TEXT = re.compile(r"\\(?:text|textbf|textit|textrm|mathrm|mathbf|mathit|mbox|operatorname)\s*\{([^{}]*)\}")
_FRACTION = re.compile(r"\\[dtc]?frac\s*(?:\{\s*(-?\d+)\s*\}\s*\{\s*(\d+)\s*\}|(\d)\s*(\d))(?!\d)")
_SPACES = re.compile(r"(?:\\[,;:! ]|\\q?quad\b|~|\s)+")

_CURRENCY = "$€£¥₹"
_NUMBER = r"(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d+)?|\.\d+"
_NUMERAL = re.compile(
    rf"""(?P<sign>[-+]?)\s*[{_CURRENCY}]?\s*(?P<sign2>-?)
    (?:(?P<whole>\d+)\s+(?=\d+\s*/))?                                   # 3 1/2
    (?P<number>{_NUMBER})
    (?:\s*/\s*(?P<under>\d+)(?![\d.])
      |\s*(?:\*|\\times|\\cdot)\s*10\s*\^\s*\{{?\s*(?P<power>[-+]?\d{{1,3}})(?!\d)(?:\s*\}})?
      |[eE](?P<exponent>[-+]?\d{{1,3}})(?![\w.]))?
    (?:\s*[{_CURRENCY}])?
    (?P<rest>.*)""",
    re.VERBOSE | re.DOTALL,
)
_PROSE = re.compile(r"[^\W\d_][^\d=+*^\\{}<>|()\[\],;:]*\Z")
_SCALES = {"hundred": 10**2, "thousand": 10**3, "million": 10**6, "billion": 10**9, "trillion": 10**12, "dozen": 12}


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


# words that make the number before them something else than a count of things
_OPERATORS = _words(
    "or and to plus minus times over divided mod modulo choose squared cubed factorial below above negative half "
    "halves third thirds fourth fourths quarter fifth fifths sixth sixths eighth eighths tenth tenths if where when "
    "st nd rd th pi sqrt log ln exp sin cos tan theta alpha beta gamma delta lambda mu sigma phi omega oo infinity"
)
_MONEY = _words("dollar dollars usd euro euros eur yen rupees bucks")
_MEASURES = {
    spelling: group.split()[0]
    for group in (
        "nm nanometers",
        "μm micrometers microns",
        "mm millimeter millimeters millimetres",
        "cm centimeter centimeters centimetres",
        "m meter meters metre metres",
        "km kilometer kilometers kilometres",
        "in inch inches",
        "ft foot feet",
        "yd yard yards",
        "mi mile miles",
        "mg milligram milligrams",
        "g gram grams",
        "kg kilogram kilograms",
        "lb lbs pound pounds",
        "oz ounce ounces",
        "ml milliliter milliliters",
        "l L liter liters litre litres",
        "cup cups",
        "gal gallon gallons",
        "cent cents",
        "ns",
        "ms",
        "s sec second seconds",
        "min mins minute minutes",
        "h hr hrs hour hours",
        "day days",
        "week weeks",
        "month months",
        "year years",
        "am",
        "pm",
        "mph",
        "J joule joules",
        "kJ kilojoules",
        "N newton newtons",
        "V volt volts",
        "W watt watts",
        "kW kilowatts",
        "K kelvin",
        "M",
        "Hz hertz",
        "eV",
    )
    for spelling in group.split()
}
_MAX_NUMERAL = 200  # characters


def plain(text: str) -> str:
    """Return `text` without what only dresses it: math delimiters, bold, boxes, quotes, closing punctuation."""
    text = "".join(_plain_character(c) for c in text)
    text = re.sub("[⁰¹²³⁴⁵⁶⁷⁸⁹⁻]+", lambda m: "^{" + m[0].translate(_SUPERSCRIPTS) + "}", text)
    text = unicodedata.normalize("NFKC", text.translate(_SYMBOLS)).translate(_SYMBOLS)
    text = text.replace(r"\$", _DOLLAR).replace("{,}", ",").replace(r"\%", "%")
    text = re.sub(r"\\(?:left|right)(?![A-Za-z])", "", re.sub(r"\\[dt]frac", r"\\frac", text))
    text = _SPACES.sub(" ", text)
    text = _TEXT.sub(r" \1 ", text)
    before = None
    while text != before:
        before = text
        text = _peel(text.strip())
    text = re.sub(r"\s*(?:\^\s*\{?\s*\\circ\s*\}?|°)\s*[CF]?\Z", " degrees", text.replace(_DOLLAR, "$"))
    text = _FRACTION.sub(lambda m: f" {m[1] or m[3]}/{m[2] or m[4]}", text)
    text = re.sub(r"\A-\s+(?=[\d.])", "-", text.strip())
    return _SPACES.sub(" ", text)


def balanced(text: str, start: int) -> int:
    """Return the index of the brace that closes the one at `start`, or -1."""
    depth = 0
    for index in range(start, len(text)):
        if text[index] == "\\":
            continue
        escaped = index > 0 and text[index - 1] == "\\"
        depth += (text[index] == "{" and not escaped) - (text[index] == "}" and not escaped)
        if depth == 0:
            return index
    return -1


@dataclass(frozen=True, slots=True)
class Numeral:
    """A plain number as an answer gives it.

    Attributes
    ----------
    value : Fraction
        The number, exact, with words such as "million" multiplied in.
    spelling : str
        How it is written without currency, thousands commas and counted things.
    percent : bool
        It stands with a percent sign.
    things : frozenset of str
        Words for what it counts or measures, measures in one spelling; money is left out.
    """

    value: Fraction
    spelling: str
    percent: bool = False
    things: frozenset[str] = frozenset()

    def equals(self, other: Numeral) -> bool:
        """Compare exactly; a fraction equals its six decimals, 50% equals 50 and 0.5.

        What is counted must not differ where both tell it: 5 cm is not 5 m, but 18 eggs are 18 eggs a day, and 18.
        """
        fewer, more = sorted((self.things, other.things), key=len)
        if not fewer <= more or (len(fewer) > 3 and fewer != more):  # many words are a statement, not a thing
            return False
        if self.percent == other.percent:
            return _same(self.value, other.value)
        share, number = (self, other) if self.percent else (other, self)
        return _same(share.value, number.value) or _same(share.value / 100, number.value)


def numeral(text: str) -> Numeral | None:
    """Read `text`, in the spelling of :func:`plain`, as one number, or return None if it is more or less than that.

    Currency, a percent sign and the counted thing may stand beside it: "$1,234.50", "18 eggs per day", "3 1/2 cups".
    """
    match = _NUMERAL.fullmatch(text) if len(text) <= _MAX_NUMERAL else None
    if match is None or (match["sign"] and match["sign2"]):
        return None
    under, whole = match["under"], match["whole"]
    if under is not None and int(under) == 0:
        return None
    number = match["number"].replace(",", "")
    power = match["power"] or match["exponent"]
    value = (int(whole) if whole else 0) + Fraction(number) / int(under or 1) * Fraction(10) ** int(power or 0)
    sign = "-" if "-" in (match["sign"], match["sign2"]) else ""
    spelling = sign + (f"{whole} " if whole else "") + number.replace(".", "0.", number.startswith("."))
    spelling += f"/{under}" if under else f"e{int(power)}" if power else ""
    if sign:
        value = -value
    return _with_rest(value, spelling, match["rest"])


def _with_rest(value: Fraction, spelling: str, rest: str) -> Numeral | None:
    glued, rest = rest[:1] not in ("", " ", "-"), rest.strip(" -").replace("a.m", "am").replace("p.m", "pm")
    percent = re.match(r"%|percent\b|pct\b", rest)
    if percent:
        glued, rest, spelling = False, rest[percent.end() :].strip(), spelling + "%"
    word = _first_word(rest)
    if not percent and word.lower() in _SCALES:
        rest = rest[len(word) :].strip()
        value, spelling = value * _SCALES[word.lower()], f"{spelling} {word.lower()}"
        word = _first_word(rest)
    if not rest:
        return Numeral(value, spelling, bool(percent))
    if not _counts(rest) or (glued and (len(word) < 2 or _measure(word) is None)):
        return None
    measure = _measure(word)
    return Numeral(value, f"{spelling} {measure}" if measure else spelling, bool(percent), _things(rest))


def _counts(rest: str) -> bool:
    """Tell whether `rest` reads as the counted thing: words, not algebra."""
    word = _first_word(rest)
    if not _PROSE.match(rest) or word.lower() in _OPERATORS or re.search(r"\bor\b", rest):
        return False
    return len(word) > 1 or _measure(word) is not None


def _first_word(text: str) -> str:
    return re.split(r"[^\w]", text, maxsplit=1)[0]


def _measure(word: str) -> str | None:
    """Return a unit's one spelling, "" for money and None for any other word."""
    if word.lower() in _MONEY:
        return ""
    return _MEASURES.get(word, _MEASURES.get(word.lower()) if len(word) > 1 else None)


def _things(rest: str) -> frozenset[str]:
    words = (
        _measure(word) if _measure(word) is not None else word.lower().rstrip("s")
        for word in re.findall(r"[^\W\d_]+", rest)
    )
    return frozenset(word for word in words if word)


def _same(a: Fraction, b: Fraction) -> bool:
    if a == b:
        return True
    # only a fraction without an end, such as 1/3, may differ from the decimals that stand for it
    return not (_ends(a) and _ends(b)) and round(a, 6) == round(b, 6)


def _ends(value: Fraction) -> bool:
    rest = value.denominator
    for prime in (2, 5):
        while rest % prime == 0:
            rest //= prime
    return rest == 1


def _plain_character(character: str) -> str:
    if unicodedata.decomposition(character).startswith("<fraction>"):
        return " " + unicodedata.normalize("NFKC", character).replace("⁄", "/")
    return character


def _peel(text: str) -> str:
    for left, right in _WRAPPERS:
        inner = text[len(left) : -len(right)]
        if len(text) >= len(left) + len(right) and text.startswith(left) and text.endswith(right) and left not in inner:
            return inner
    boxed = re.match(r"\\(?:boxed|fbox)\s*\{", text)
    if boxed and balanced(text, boxed.end() - 1) == len(text) - 1:
        return text[boxed.end() : -1]
    if re.fullmatch(r"\(\s*[A-Za-z]\s*\)|\{[^{}]*\}|\[\s*[A-Z]\s*\]", text) and not re.match(r"\{.*,", text):
        return text[1:-1]
    if re.fullmatch(r"[A-Za-z]\)", text):
        return text[0]
    if len(text) > 1 and text[0] in _QUOTES and text[-1] in _QUOTES:
        return text[1:-1]
    if text.endswith((".", ",", ";", ":")) or (text[-1:] in ("!", "?") and text[-2:-1].isalpha() and len(text) > 2):
        return text[:-1]
    return text
