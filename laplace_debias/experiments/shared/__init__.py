"""What the experiments share: settings, storage, trained networks, draws."""
