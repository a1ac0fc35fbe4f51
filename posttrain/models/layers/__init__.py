"""What decoder layers compute with: Liger, torch.compile, fused LoRA, selective checkpointing."""
