"""Names that people give to dimensions, coordinates and numbers in their files."""

from __future__ import annotations

import re
import unicodedata

from ups.config.description import RESERVED


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


TIMES = _words(
    "t time times frame frames step steps timestep timesteps snapshot snapshots tau date iteration"
) | _words("zeit zeiten temps tiempo tempo tijd czas aika vremya zaman jikan shijian")
TRAJECTORIES = _words(
    "n trajectory trajectories traj sample samples simulation simulations sim sims run runs realization realizations "
    "ensemble member members number batch b case cases seed ic experiment experiments index"
)
# Place in other languages: such an axis is called x.
PLACES = _words(
    "ort orte ortskoordinate raum abszisse lieu espace abscisse lugar espacio posicion posición luogo spazio posizione "
    "espaco posicao plaats ruimte miejsce polozenie paikka mesto konum"
)
# Which axis of a right-handed picture a name usually means.
SPACES = {
    **dict.fromkeys(
        ("x", "xs", "xx", "xc", "i", "lon", "longitude", "east", "r", "radius", "position", "space", "s"), 0
    ),
    **dict.fromkeys(PLACES, 0),
    **dict.fromkeys(("y", "ys", "yy", "yc", "j", "lat", "latitude", "north", "theta"), 1),
    **dict.fromkeys(("z", "zs", "zz", "zc", "k", "height", "depth", "level", "lev", "altitude", "phi"), 2),
}
CHANNELS = _words("c ch channel channels field fields variable variables var vars species")
COMPONENTS = _words("component components comp vector direction")
TIME_UNITS = _words("s sec secs second seconds ms us ns min minute minutes h hr hour hours day days d year years yr")
LENGTH_UNITS = _words("m meter meters mm cm um nm km degrees_north degrees_east degree degrees deg rad radian radians")
# Numbers about how a file was made: named, and no parameter of an equation.
ABOUT_THE_FILE = _words("seed random_seed version format_version file_version id")


def is_about_the_file(name: str, value: object, sizes: set[int]) -> bool:
    """Whether a number is about the file: a version, a seed, the size of a dimension."""
    short = name.split("/")[-1].lower()
    count = re.fullmatch(r"(n|num|number_of|n_|num_)_?[a-z]*", short) is not None
    return (
        short in ABOUT_THE_FILE
        or short.startswith("grib_")
        or (count and isinstance(value, float) and value.is_integer() and int(value) in sizes)
    )


def plain_name(name: str, default: str) -> str:
    """A name that a task can have: without spaces, Greek letters written out."""
    written = "".join(c if c.isascii() else unicodedata.name(c, "").split(" ")[-1].lower() for c in name)
    text = re.sub(r"[^A-Za-z0-9_.-]", "_", written)[:60].strip("_.-") or default
    if text.lower() in RESERVED:
        text = f"{text}_"
    return text if re.match(r"[A-Za-z_]", text) else f"{default}_{text}"
