"""
What a run came to, in one page: for a terminal, for scripts, and as `report.html`. Made from
what the run left in its folder or in the store; it asks no machine.
"""

from runner.report.gather import gather_folder, gather_store
from runner.report.model import Report, Sample, as_json
from runner.report.page import page
from runner.report.text import text

__all__ = ["Report", "Sample", "as_json", "gather_folder", "gather_store", "page", "text"]
