"""How weights travel, on both sides: the wire format and the transports besides HTTP. Trainers import this package."""
