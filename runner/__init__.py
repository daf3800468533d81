"""The supervisor: run one training job on one rented server, and stop the server when it is done."""

__version__ = "0.1.0"
