"""Sizes and times as people read them. Apart from the other words, since most commands need no more of them."""


def size(num_bytes: float) -> str:
    """`12.4 GB`: decimal units, as disks and bills have them."""
    for unit in ("B", "kB", "MB", "GB"):
        if num_bytes < 1000:  # noqa: PLR2004  # the base of the units
            return f"{num_bytes:.0f} {unit}" if unit == "B" else f"{num_bytes:.1f} {unit}"
        num_bytes /= 1000
    return f"{num_bytes:.1f} TB"


def span(seconds: float) -> str:
    """`45s`, `12m 30s`, `3h 05m`, `2d 04h`."""
    whole = max(round(seconds), 0)
    if whole < 60:  # noqa: PLR2004
        return f"{whole}s"
    if whole < 3600:  # noqa: PLR2004
        return f"{whole // 60}m {whole % 60:02d}s"
    if whole < 86_400:  # noqa: PLR2004
        return f"{whole // 3600}h {whole % 3600 // 60:02d}m"
    return f"{whole // 86_400}d {whole % 86_400 // 3600:02d}h"
