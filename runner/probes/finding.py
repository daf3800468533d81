"""What a probe says."""

from runner.facts import Finding, Severity

__all__ = ["Finding", "Severity"]
