"""Pre-training of Megatron-Core models with megatron_fsdp."""

__version__ = "0.2.0"
"""The distribution's version; a test holds it equal to megatron_fsdp's."""
