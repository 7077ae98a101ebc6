"""The process that `_worker.Worker` starts."""

from musigma.lab.bench._worker import serve

serve()
