"""
Processes and their traces: starting, finding, ending them, and reading what they left.

The rule of this room: a process is known by its pid and start time, an attempt's processes
by the marker in their environment. Nothing is remembered that /proc can tell.
"""
