"""From options to a trainer that runs."""
