"""What a run tells whoever looks for a mistake in it, in the words of the user's model."""
