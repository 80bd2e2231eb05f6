"""Pre-training of Megatron-Core models with megatron_fsdp."""
