"""What operators look at on this node and on all others: diagnostics, traces and captures."""
