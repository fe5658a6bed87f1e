"""Files by digest between nodes of one mesh: a shelf and its servicer on one side, a resumable fetch on the other."""
