"""How weights travel, on both sides: the wire format and the ways besides HTTP. Trainers import this room."""
