"""What is made of what the driver tells: Xids, findings, the health of a tray."""
