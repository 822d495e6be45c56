"""From shape, workload and machine to a policy and what it will do. No torch, so that answers come
at once.

``pricing`` says what a task and a pass cost, ``replay`` which passes a job has, ``search`` finds
the policy, ``simulation`` runs its schedule on a virtual clock, ``papers`` has planners of papers.
"""
