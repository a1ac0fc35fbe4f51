"""Loading models, asking them about tokens, and keeping a reference. The only layer that touches peft, FSDP and `lm_head`."""
