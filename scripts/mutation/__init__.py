"""What scripts/mutate is made of: recipes, faults, runs with holes, and the training program in job/."""
