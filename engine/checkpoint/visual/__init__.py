"""Models that read pictures: how one becomes numbers and tokens, and the towers that encode them."""
