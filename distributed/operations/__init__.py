"""Operations around a run: deploy it, report on it, tune it, check a machine, measure throughput."""
