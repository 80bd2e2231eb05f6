"""Name, version and description of the package; `pyproject.toml` takes the version from here."""

MAJOR = 0
MINOR = 2
PATCH = 0
PRE_RELEASE = ""

__shortversion__ = f"{MAJOR}.{MINOR}.{PATCH}"
__version__ = __shortversion__ + PRE_RELEASE

__package_name__ = "megatron_fsdp"
__contact_names__ = "The megatron-fsdp developers"
# Empty: the project has no public address yet, and its metadata names none.
__contact_emails__ = ""
__homepage__ = ""
__repository_url__ = ""
__download_url__ = ""
__description__ = "Fully sharded data parallelism for PyTorch and Megatron-Core, and GPT pre-training built on it."
__license__ = "Apache-2.0"
__keywords__ = "deep learning, distributed training, data parallelism, sharding, ZeRO, FSDP, HSDP, PyTorch, Megatron"
