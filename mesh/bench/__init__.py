"""What every kvmesh benchmark is made of; each lives beside what it measures and is found by entry point."""
