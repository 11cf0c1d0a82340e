"""The FSDP ranks: model, packing, step, checkpoints."""
