"""
A local VRAMfarm: the assumed API over HTTP, servers that are real processes, and a bill.

The rule: what was answered is durable. Killed at any moment and started again, the farm goes
on with the servers it had.
"""
