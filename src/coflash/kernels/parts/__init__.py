"""What kernels share: arithmetic, barriers, masks, tile orders, stores."""
