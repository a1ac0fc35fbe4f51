"""From dataset rows to TokenBatches: formats, checks, rendering, packing, collation. The only layer that uses tokenizers."""
