"""Render Kubernetes manifests: Jobs, JobSets, TrainJobs and MPIJobs."""
