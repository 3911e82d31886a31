# kvcheck on a CPU: docker build -t kvcheck . && docker run --rm -v "$PWD/runs:/runs" kvcheck stress --out /runs
# Mooncake's cell needs a network namespace of its own: docker needs --cap-add SYS_ADMIN for it, podman no option; else it is "not tried".
FROM python:3.11-slim-bookworm

RUN apt-get update \
 && apt-get install -y --no-install-recommends libibverbs1 libnuma1 libcurl4 git \
 && rm -rf /var/lib/apt/lists/*

WORKDIR /kvcheck
COPY constraints.txt pyproject.toml README.md LICENSE ./
COPY kvcheck kvcheck
# The CPU build of torch: a plain install brings gigabytes of CUDA.
RUN pip install --no-cache-dir torch==2.13.0 --index-url https://download.pytorch.org/whl/cpu \
 && pip install --no-cache-dir -c constraints.txt '.[mooncake]' \
 && useradd --create-home user \
 && mkdir /runs && chown user /runs

USER user
WORKDIR /home/user
VOLUME /runs
ENTRYPOINT ["kvcheck"]
CMD ["--help"]
