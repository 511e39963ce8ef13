"""job: the rollout command's work: Ray, engines, pool, client, files, alerts, and the way out.

`settings` is what the flags say, `run` the job from start to summary, `breakage` the two kills of
the demonstration, `view` what a person sees.
"""
