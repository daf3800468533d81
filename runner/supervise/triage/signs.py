"""What lines tell beside errors: signs that make a label more exact, and when a line was written."""

from __future__ import annotations

import re
from typing import Final

SIGNS: Final = {
    "p2p": re.compile(r"via P2P|P2P/|p2p\.cc|P2P Chunksize"),
    "acs": re.compile(r"ReqRedir\+"),
    "nvlink": re.compile(r"\bNV\d{1,2}\b"),
    "host_memory": re.compile(r"(?i)cpu rss|\brss\b|CPU Virtual Memory|\bRAM\b|host memory|OOMKilled=true|oom_kill [1-9]"),
    "kernel_oom": re.compile(r"(?i)out of memory: kill|invoked oom-killer|OOMKilled=true|oom_kill [1-9]"),
    "preparing": re.compile(r"(?i)\b(?:tokenizing|pre-?processing|grouping texts|packing|building (?:index|dataset|cache))\b|\b(?:map|filter|generating \w+ split)\b.*(?:\d%|examples/s)"),
    "stall": re.compile(r"(?i)no (?:output|progress|step\w*|log\w*|line\w*)\b.*\b(?:for|since|in)\b|\bstall|\bhangs?\b|waits? (?:for|on) (?:stdin|a prompt)"),
    "busy_cards": re.compile(r"(?i)(?:util|use|usage)\w*\W{0,3}(?:100(?:\s?%)?[/, ]*)+"),
    "clock": re.compile(r"(?i)(?:system clock|chronyd?|timesyncd|ntpd?)\b.*(?:wrong|step|jump|adjust|chang|forward|backward|offset)|time jump"),
    "no_xid": re.compile(r"(?i)no (?:new )?xid|dmesg\b.*(?:clean|empty|nothing)"),
    "bad_card": re.compile(r"Xid \(PCI:[^)]*\): (?:92|63|48|64|94|95),|(?i:(?:volatile|aggregate|uncorrect\w+)[^:]*ecc[^:]*:\s*[1-9])|(?i:ecc errors?\W+[1-9]\d*)|(?i:remapped rows.*[1-9])"),
    "shm_leftovers": re.compile(r"\bdev/shm\b.*(?:nccl-|torch_|sem\.|files?\b|segments?\b).*|(?:leaked|left ?over|stale|orphan)\w* .*(?:shm|shared memory|segment)"),
    "nan": re.compile(r"(?i)\bloss\w*\W{0,4}nan\b|\bnan\b.*(?:loss|grad|step|batch)|grad_?norm\W{0,4}(?:nan|inf)\b"),
}  # fmt: skip

_STAMP: Final = (
    re.compile(r"\b[EWIF](?P<month>[01]?\d)(?P<day>[0-3]\d) (?P<h>\d\d):(?P<m>\d\d):(?P<s>\d\d)"),
    re.compile(r"\d{4}-(?P<month>\d\d)-(?P<day>\d\d)[ T_](?P<h>\d\d):(?P<m>\d\d):(?P<s>\d\d)"),
    re.compile(r"^\[\w{3} (?P<name>\w{3}) +(?P<day>\d+) (?P<h>\d\d):(?P<m>\d\d):(?P<s>\d\d)"),
)
_MONTHS: Final = ("Jan", "Feb", "Mar", "Apr", "May", "Jun", "Jul", "Aug", "Sep", "Oct", "Nov", "Dec")


def stamp(text: str) -> float | None:
    """Seconds since the beginning of the year, if the line says when it was written."""
    for pattern in _STAMP:
        if match := pattern.search(text):
            told = match.groupdict()
            name = told.get("name")
            month = _MONTHS.index(name) + 1 if name in _MONTHS else int(told.get("month") or 0)
            return ((month * 31 + int(told["day"])) * 24 + int(told["h"])) * 3600 + int(told["m"]) * 60 + int(told["s"])
    return None
