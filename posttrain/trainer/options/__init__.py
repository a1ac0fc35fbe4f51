"""Options of trainers, declared and documented once."""
