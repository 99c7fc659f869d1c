"""What several subjects share."""
