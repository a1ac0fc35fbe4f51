"""Images as tokens: what each family's processor writes for an image of a given size, and at which positions it stands."""
