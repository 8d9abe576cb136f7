"""Schedulers and worker groups of training frameworks, on Troupe's own API. docs/adapters.md explains how to switch a
program over.

    troupe.adapters.areal    AReaL's Scheduler
    troupe.adapters.verl     verl's WorkerGroup and ResourcePool
    troupe.adapters.roll     ROLL's Cluster and ResourceManager

Each module imports its framework; this package imports none.
"""
