"""The default engine: it lives in the trainer's process and reads the trainer's weights in place.

engine.py            NativeEngine and its session: what is asked of it from outside
scheduler.py         who runs, who waits, whose pages are whose
cache.py             pages of keys and values, allocated inside of a session only
eight_bits.py        keys and values in 8 bits
attention.py         the attention of a prefill and of a decode step, over those pages
decode_attention.py  one query a row against its pages, in plain torch; decode_triton.py: the same on CUDA
dense_rows.py        the same against rows that lie side by side: what a CPU does where they fit
eight_bit_weights.py products in 8 bits, inside of a session
packed_weights.py    weights in the order in which a CPU's products read them, inside of a session
step.py              one decode step on the device: model, head, draw, stop test, positions; sampling_triton.py: its end on CUDA
drafts.py            the same step with several lines a row, for tokens that are looked up ahead
graphs.py            that step as a CUDA graph
probe.py             can this model be run so?
"""
