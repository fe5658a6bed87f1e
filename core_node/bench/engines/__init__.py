"""What `kvmesh bench engine` is made of: the work, the engines as processes, the record of rounds, the report."""
