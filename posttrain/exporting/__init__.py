"""A trained model in other people's formats, compared with what was trained before anybody gets it."""
