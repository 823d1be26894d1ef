"""Judge the health of GPUs from what the driver reports: Xids, readings, and the health of a tray."""
