"""What scripts that use Hugging Face Accelerate need beside `rackrun.elastic`."""
