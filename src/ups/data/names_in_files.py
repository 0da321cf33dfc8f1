"""Names that people give to dimensions, coordinates and numbers in their files."""

from __future__ import annotations


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


TIMES = _words("t time times frame frames step steps timestep timesteps snapshot snapshots tau date iteration")
TRAJECTORIES = _words(
    "n trajectory trajectories traj sample samples simulation simulations sim sims run runs realization realizations "
    "ensemble member members number batch b case cases seed ic experiment experiments index"
)
# Which axis of a right-handed picture a name usually means.
SPACES = {
    **dict.fromkeys(
        ("x", "xs", "xx", "xc", "i", "lon", "longitude", "east", "r", "radius", "position", "space", "s"), 0
    ),
    **dict.fromkeys(("y", "ys", "yy", "yc", "j", "lat", "latitude", "north", "theta"), 1),
    **dict.fromkeys(("z", "zs", "zz", "zc", "k", "height", "depth", "level", "lev", "altitude", "phi"), 2),
}
CHANNELS = _words("c ch channel channels field fields variable variables var vars species")
COMPONENTS = _words("component components comp vector direction")
TIME_UNITS = _words("s sec secs second seconds ms us ns min minute minutes h hr hour hours day days d year years yr")
LENGTH_UNITS = _words("m meter meters mm cm um nm km degrees_north degrees_east degree degrees deg rad radian radians")
STEP_NAMES = _words("dt delta_t deltat time_step timestep dt_save save_dt saveat sampling_time frame_dt")
END_NAMES = _words("t_end tend t_final tfinal final_time end_time t_max tmax")
LENGTH_NAMES = _words("l length domain_length extent domain_size box_size width domain")
SPACING_NAMES = _words("dx delta_x spacing grid_spacing")
# Numbers about how a file was made: named, and no parameter of an equation.
ABOUT_THE_FILE = _words("seed random_seed version format_version file_version id")
