"""torch.compile and exports."""
