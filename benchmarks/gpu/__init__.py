"""What a machine with two cores cannot measure: K-FAC's parts on one GPU, against what the GPU can do at best."""
