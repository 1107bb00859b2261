# The two commands of the README:  docker build -t cdgrab . && docker run cdgrab
# One of them, or any other target:  docker run cdgrab reproduce-lr-hmda SIZE=smoke
# Results and data outside of it:  docker run -v "$PWD/results:/cdgrab/results" -v "$PWD/data:/cdgrab/data" cdgrab …
FROM python:3.11-slim

# git: every run notes its commit; a compiler: torch.compile on a CPU
RUN apt-get update && apt-get install --yes --no-install-recommends g++ git make && rm -rf /var/lib/apt/lists/*

RUN useradd --create-home user && install -d -o user /cdgrab
USER user
WORKDIR /cdgrab

# packages first: they are installed again only when their lists change
COPY --chown=user Makefile pyproject.toml requirements.lock requirements-no-deps.lock README.md LICENSE ./
COPY --chown=user scripts/package_readme.py scripts/
COPY --chown=user cdgrab cdgrab
RUN make setup
COPY --chown=user . .

ENTRYPOINT ["make"]
CMD ["reproduce-lr-hmda", "test"]
