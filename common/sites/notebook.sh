# A notebook that lends GPUs, such as Kaggle's or Colab's: SITE=notebook (docs/KAGGLE.md).
# Its Python has PyTorch. Do not run `make venv` there: it fetches 6 GB and another CUDA.
# Data go to data/ in the repository, which you may write.
PYTHON=(python)
