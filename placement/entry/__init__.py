"""The front door that every entry runs: authenticate, classify, decide, run the plan, receipt."""
