# Troupe. `make help` lists the targets.
GO       ?= go
PACKAGES := ./...
# One version for the program, the library, the wheel and each agent: that of the file VERSION, and the commit unless it is tagged with it.
BASE     := $(shell cat VERSION)
COMMIT   := $(shell git rev-parse --short=8 HEAD 2>/dev/null)
TAGGED   := $(filter v$(BASE),$(shell git tag --points-at HEAD 2>/dev/null))
DIRTY    := $(if $(shell git status --porcelain --untracked-files=no 2>/dev/null),dirty)
empty    :=
space    := $(empty) $(empty)
LOCAL    := $(subst $(space),.,$(strip $(if $(COMMIT),$(if $(TAGGED),,g$(COMMIT))) $(DIRTY)))
VERSION  := $(BASE)$(if $(LOCAL),+$(LOCAL))
export TROUPE_VERSION := $(VERSION)
export CGO_CFLAGS ?= -O2 -Wno-deprecated-declarations

.PHONY: help build demo test go-test race lint go-lint verify heavy fuzz soak clean version man release wheel
.PHONY: python python-test python-test-core python-test-ray python-lint browser-test gpu-check
.PHONY: bench bench-check bench-python bench-ray bench-ray-hosts bench-output bench-device memory-python
.PHONY: adapters-check adapters-measure frameworks
.PHONY: upgrade-check crash-model chaos one-book soak-pipeline soak-rollouts shm-faults placement-histories

help: ## this list
	@awk -F':.*## ' '/^[a-z-]+:.*## /{printf "  %-20s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

build: ## bin/troupe, and bin/troupe-demo
	$(GO) build -ldflags "-X main.version=$(VERSION)" -o bin/troupe ./cmd/troupe
	$(GO) build -o bin/troupe-demo ./examples/demo

demo: build ## a small training job over five roles, in one process
	bin/troupe-demo

# Go and Python one after the other: each fills two cores.
test: ## all tests, Go and Python
	@$(MAKE) --no-print-directory -j2 python
	@$(MAKE) --no-print-directory go-test
	@$(MAKE) --no-print-directory python-test

# The tests wait more than they compute: five packages, the longest first, and six tests of each at once fill two cores. `make lint` vets them; no symbols, as
# they are linked for one run.
go-test: ## the Go tests
	$(GO) test -vet=off -ldflags "-s -w" -p 5 -parallel 6 -timeout 30m ./cmd/troupe ./bus/calls ./cmd/libtroupe $(PACKAGES)

# Long runs and clusters of heads have the machine for themselves under the race detector: the rest leaves them too little of two cores.
ALONE := TestSoak$$|TestALongItemDoesNotKeepTheOthersOnDisk|TestAServerOfAClusterDies|TestModelOfCrashes|TestDriverMemoryIsBounded|TestTimelineRequestsAreChecked|TestOneHeadBecomesThree|TestThreeHeadsAreOneCluster|TestClusterUpgrade|TestHeadGrowsAndShrinks|TestLastMemberGoesOnAlone|TestFaultsOfThreeHeads
race: ## the tests under the race detector, without those of thousands of ranks on the page
	$(GO) test -race -short -vet=off -p 2 -timeout 40m $(PACKAGES)
	$(GO) test -race -vet=off -p 1 -parallel 1 -timeout 20m -run '$(ALONE)' ./pipeline ./bus/calls ./cmd/troupe ./cmd/troupe/dashboard

lint: go-lint python-lint ## gofmt, vet, staticcheck, errcheck; ruff (its rules and its format) and mypy

go-lint:
	@files=$$(gofmt -l .); test -z "$$files" || { echo "run gofmt -w on:"; echo "$$files"; exit 1; }
	$(GO) vet $(PACKAGES)
	$(GO) tool staticcheck $(PACKAGES)
	$(GO) tool errcheck -ignoretests -blank=false $(PACKAGES)

# Python: the library and the program lie beside the package, which .venv has installed from where it is.
PYTHON ?= python3
VENV   := .venv
LIB    := python/troupe/bin/libtroupe.so

$(VENV)/ready: python/pyproject.toml Makefile
	$(PYTHON) -m venv $(VENV)
	$(VENV)/bin/python -m pip install -q --disable-pip-version-check setuptools wheel msgpack cloudpickle numpy pytest pytest-xdist mypy ruff nbclient ipykernel opentelemetry-api joblib
	mkdir -p python/troupe/bin
	$(VENV)/bin/python -m pip install -q --disable-pip-version-check --no-build-isolation --no-deps -e python --config-settings editable_mode=compat
	touch $@

python: build $(VENV)/ready ## the Go core as a library, and .venv with the package and numpy
	mkdir -p python/troupe/bin
	$(GO) build -tags testhooks -buildmode=c-shared -ldflags "-s -w -X main.version=$(VERSION)" -o $(LIB) ./cmd/libtroupe
	cp -f bin/troupe python/troupe/bin/troupe
	$(VENV)/bin/python -m compileall -q python/troupe # as an installation does: a worker that starts should not have to

# troupe.ray and Troupe's own API each hold the one session of a process: two runs, side by side. The tests of one file of troupe.ray share a session. The tests
# of weights have processes of their own: a session keeps the newest version that it has published, and a simulated device, which the others count as theirs.
python-test: ## the Python suite; `make python` first
	@$(MAKE) --no-print-directory -j2 python-test-core python-test-ray

python-test-core:
	cd python && ../$(VENV)/bin/python -m pytest -n 5 --dist worksteal --ignore tests/ray_api --ignore tests/test_weights.py
	cd python && ../$(VENV)/bin/python -m pytest -n 3 tests/test_weights.py

python-test-ray:
	cd python && ../$(VENV)/bin/python -m pytest -n 2 --dist loadfile tests/ray_api

PYTHON_SOURCES := python examples/python examples/pipelines benchmarks/python benchmarks/upgrade bus/wire/testdata
python-lint: $(VENV)/ready
	$(VENV)/bin/ruff check -q --config python/pyproject.toml $(PYTHON_SOURCES)
	$(VENV)/bin/ruff format -q --check --config python/pyproject.toml $(PYTHON_SOURCES)
	cd python && ../$(VENV)/bin/mypy

wheel: python ## dist/: one wheel with the Go program and the library in it
	rm -rf python/build dist
	$(GO) build -ldflags "-s -w -X main.version=$(VERSION)" -o python/troupe/bin/troupe ./cmd/troupe
	rm -f python/troupe/bin/*.h
	$(VENV)/bin/python -m pip wheel -q --disable-pip-version-check --no-build-isolation --no-deps -w dist ./python
	@ls dist

version: ## the version that is built
	@echo $(VERSION)

man: build ## dist/man: a man page for every command
	bin/troupe man dist/man

# The program for both platforms, with NVML where there is a C compiler for the platform (CC_arm64, CC_amd64); wheels where there is one, because the
# library needs it.
CC_amd64 ?= $(if $(filter x86_64,$(shell uname -m)),cc,x86_64-linux-gnu-gcc)
CC_arm64 ?= $(if $(filter aarch64,$(shell uname -m)),cc,aarch64-linux-gnu-gcc)
release: python ## dist/: programs for linux/amd64 and linux/arm64, wheels, man pages, SHA256SUMS
	rm -rf dist python/build
	$(MAKE) --no-print-directory man
	tar -C dist -czf dist/troupe-$(VERSION)-man.tar.gz man && rm -rf dist/man
	@set -e; for arch in amd64 arm64; do \
	  cc=$(CC_amd64); machine=x86_64; [ $$arch = amd64 ] || { cc=$(CC_arm64); machine=aarch64; }; \
	  program=dist/troupe-$(VERSION)-linux-$$arch; \
	  if command -v $$cc >/dev/null; then \
	    GOOS=linux GOARCH=$$arch CGO_ENABLED=1 CC=$$cc $(GO) build -ldflags "-s -w -X main.version=$(VERSION)" -o $$program ./cmd/troupe; \
	    GOOS=linux GOARCH=$$arch CGO_ENABLED=1 CC=$$cc $(GO) build -buildmode=c-shared -ldflags "-s -w -X main.version=$(VERSION)" -o $(LIB) ./cmd/libtroupe; \
	    cp -f $$program python/troupe/bin/troupe; rm -f python/troupe/bin/*.h; rm -rf python/build; \
	    TROUPE_MACHINE=$$machine $(VENV)/bin/python -m pip wheel -q --disable-pip-version-check --no-build-isolation --no-deps -w dist ./python; \
	  else \
	    echo "no $$cc: linux/$$arch gets a program without NVML, and no wheel"; \
	    GOOS=linux GOARCH=$$arch CGO_ENABLED=0 $(GO) build -ldflags "-s -w -X main.version=$(VERSION)" -o $$program ./cmd/troupe; \
	  fi; \
	done
	cd dist && sha256sum * > SHA256SUMS && cat SHA256SUMS

bench-python: ## calls from Python, one JSON object a line; ROWS=call_1_1,create_8 picks, ROUNDS=5 for more than three
	@$(VENV)/bin/python benchmarks/python/bench.py $(if $(ROWS),--rows $(ROWS)) $(if $(ROUNDS),--rounds $(ROUNDS))

bench-ray: ## troupe.ray beside Troupe's own API and Ray: ROWS=call_1_1,create_8 picks, RAY_PYTHON=… has Ray, JSON=1 for one JSON object a line
	@RAY_PYTHON=$(RAY_PYTHON) $(VENV)/bin/python benchmarks/python/bench_ray.py $(if $(ROWS),--rows $(ROWS)) $(if $(JSON),--json)

bench-ray-hosts: ## large values of troupe.ray between network namespaces, beside Ray: RAY_PYTHON=… has Ray, ROWS=result,forward, ROUNDS=10; needs root
	@RAY_PYTHON=$(RAY_PYTHON) $(VENV)/bin/python benchmarks/python/ray_hosts.py $(if $(ROWS),--rows $(ROWS)) $(if $(ROUNDS),--rounds $(ROUNDS))

bench-output: ## how much 32 ranks that print 1,000 lines a second each slow down calls
	@TROUPE_BENCH_QUIET=1 $(VENV)/bin/python benchmarks/python/output.py

CALLS ?= 1000
memory-python: ## resident memory of a driver and its workers before, during and after 1,000 large calls (CALLS)
	@$(VENV)/bin/python benchmarks/python/memory.py $(CALLS)

bench-device: ## tensors on a GPU between workers: checks, and 1 GiB by each way (MIB, ROUNDS); needs a GPU and a PYTHON with torch; `make python` first
	@PYTHONPATH=python $(PYTHON) benchmarks/python/device_tensors.py

FRAMEWORKS ?= areal
adapters-check: ## frameworks' own tests with troupe.adapters and without: GITS has their git directories, PYTHON their dependencies (FRAMEWORKS); `make python` first
	@$(PYTHON) python/tests/upstream/check.py --gits $(GITS) --python $(PYTHON) $(FRAMEWORKS)

adapters-measure: ## calls by frameworks with troupe.adapters and without, in turns: GITS, PYTHON, FRAMEWORKS as above
	@$(PYTHON) python/tests/upstream/check.py --measure --gits $(GITS) --python $(PYTHON) $(FRAMEWORKS)

frameworks: ## programs and tests of frameworks on Ray and on troupe.ray, side by side: GITS, PYTHON as above, also with Ray (NAMES); `make python` first
	@$(PYTHON) python/tests/upstream/frameworks.py --gits $(GITS) --python $(PYTHON) $(NAMES)

SHM_ROUNDS ?= 200
shm-faults: ## 200 rounds of processes killed, stopped and forked while large values are on their way (SHM_ROUNDS); `make python` first
	cd python && TROUPE_SHM_ROUNDS=$(SHM_ROUNDS) ../$(VENV)/bin/python -m pytest -q -o faulthandler_timeout=3600 tests/test_shared_memory_faults.py

bench: build ## fan-out against the bare nats.go floor; writes bench.json and report.html
	bin/troupe bench fanout --workers 1,8,64,512 --bytes 64,4096 --json > bench.json
	bin/troupe bench report bench.json -o report.html

BASELINE ?= benchmarks/baseline.json
bench-check: build ## the fan-out's ratios to the floor beside those of benchmarks/baseline.json (BASELINE); a quiet machine, about a minute
	bin/troupe bench fanout --workers 1,8,64 --bytes 64,4096 --json > bench.json
	bin/troupe bench check $(BASELINE) bench.json

browser-test: ## the dashboard in a real browser; installs Chromium where apt-get can
	@command -v chromium chromium-browser google-chrome >/dev/null || { apt-get update -qq && apt-get install -y -qq chromium; }
	$(GO) test -count=1 -timeout 5m ./cmd/troupe/dashboard

# The other version is a commit. Nothing was released before 0.1.0: by default it is the last commit, built as version 0.0.9.
UPGRADE_FROM    ?= HEAD
UPGRADE_VERSION ?= 0.0.9
upgrade-check: python ## agents, drivers and stores of another version (the commit UPGRADE_FROM) with this one
	@set -e; dir=$$(mktemp -d); trap 'rm -rf "$$dir"' EXIT; mkdir -p $$dir/source $$dir/from/python $$dir/to/python; \
	git archive $(UPGRADE_FROM) | tar -x -C $$dir/source; \
	echo "building $(UPGRADE_FROM) as $(UPGRADE_VERSION)"; \
	( cd $$dir/source; mkdir -p python/troupe/bin; \
	  $(GO) build -buildvcs=false -ldflags "-X main.version=$(UPGRADE_VERSION)" -o ../from/troupe ./cmd/troupe; \
	  $(GO) build -buildvcs=false -o ../from/processes ./examples/processes; \
	  $(GO) build -buildvcs=false -buildmode=c-shared -ldflags "-X main.version=$(UPGRADE_VERSION)" -o python/troupe/bin/libtroupe.so ./cmd/libtroupe; \
	  cp ../from/troupe python/troupe/bin/; mv python/troupe ../from/python/ ); \
	rm -rf $$dir/source; \
	cp bin/troupe $$dir/to/; cp -r python/troupe $$dir/to/python/; \
	$(GO) build -o $$dir/to/processes ./examples/processes; \
	TROUPE_UPGRADE_FROM=$$dir/from TROUPE_UPGRADE_TO=$$dir/to TROUPE_UPGRADE_PYTHON=$(CURDIR)/$(VENV)/bin/python \
	  $(GO) test -count=1 -timeout 20m -v ./benchmarks/upgrade

heavy: ## the long variants: one argument and one answer of 1 GiB, more random faults, 4,096 ranks with a connection each, thousands of roles; the rest is in make test
	TROUPE_HEAVY=1 $(GO) test -count=1 -timeout 20m ./bus
	TROUPE_HEAVY=1 $(GO) test -count=1 -timeout 20m -run 'TestManyRanksDropNothing|TestMemoryStaysFlat|TestPageWithMany' ./roles ./cmd/troupe ./cmd/troupe/dashboard

FUZZTIME ?= 30s
fuzz: ## each fuzz target for half a minute (FUZZTIME)
	@for dir in $$(grep -rl '^func Fuzz' --include='*_test.go' . | xargs -n1 dirname | sort -u); do \
		for target in $$($(GO) test -list '^Fuzz' $$dir | grep '^Fuzz'); do \
			echo "$$dir $$target"; $(GO) test -run '^$$' -fuzz "^$$target\$$" -fuzztime $(FUZZTIME) $$dir || exit 1; \
		done; \
	done

HISTORIES ?= 10000
placement-histories: ## 10,000 histories of reservations under faults (HISTORIES), in four shards
	$(GO) test -c -o bin/placement.test ./placement
	@cd placement && for shard in 0 1 2 3; do \
	  TROUPE_HISTORIES=$$(($(HISTORIES) / 4)) TROUPE_SEED=$$((shard * $(HISTORIES) + 1)) ../bin/placement.test -test.run 'TestHistories|TestLanes' -test.timeout 6h & \
	  pids="$$pids $$!"; \
	done; failed=0; for pid in $$pids; do wait $$pid || failed=1; done; exit $$failed

SECONDS_OF_RACE ?= 300
one-book: python ## roles, Ray actors, tasks and placement groups race for eight devices of one head for five minutes, under kills (SECONDS_OF_RACE)
	$(VENV)/bin/python benchmarks/python/one_book.py --seconds $(SECONDS_OF_RACE)

gpu-check: build ## on a machine with an NVIDIA GPU: the inventory, a foreign process, the device granted again
	examples/gpu/check.sh

soak: ## five rounds of every test, under the race detector
	$(GO) test -race -count=5 -timeout 60m $(PACKAGES)

SOAK_ITEMS ?= 100000
soak-pipeline: ## 100,000 items under kills; a fast producer for a minute; 100 killed workers; items of 256 MiB; 50,000 schedules
	TROUPE_SOAK_ITEMS=$(SOAK_ITEMS) TROUPE_SOAK_SECONDS=60 TROUPE_SOAK_KILLS=100 \
	  $(GO) test -count=1 -timeout 60m -v -run 'TestSoak$$|TestMemoryStaysBounded|TestItemsOfAKilledWorkerMoveToOthers' ./pipeline
	TROUPE_LARGE_MIB=256 $(GO) test -count=1 -timeout 10m -v -run 'TestItemsLargerThanAMessage' ./pipeline
	$(GO) test -count=1 -timeout 10m -run 'TestEveryItemHasOneEnd' ./pipeline/flow -rapid.checks=50000

SECONDS_OF_ROLLOUTS ?= 300
soak-rollouts: python ## rollouts while head, engine, workers and driver are killed every two seconds for five minutes (SECONDS_OF_ROLLOUTS)
	$(VENV)/bin/python benchmarks/python/soak_rollouts.py --seconds $(SECONDS_OF_ROLLOUTS)
	$(GO) test -count=1 -timeout 10m -run 'TestNoGroupIsLost' ./pipeline/groups -rapid.checks=50000

CRASH_RESTARTS ?= 300
crash-model: ## 300 kills of the head, and 75 of head and NATS servers, against a model of all that is stored (CRASH_RESTARTS)
	TROUPE_CRASH_RESTARTS=$(CRASH_RESTARTS) $(GO) test -count=1 -timeout 120m -v -run 'TestNothingComesBackAfterACrash' ./benchmarks/chaos

TROUPE_CHAOS ?= 30m
chaos: ## kills, freezes, partitions, packet loss and a full disk for TROUPE_CHAOS=30m; needs root, iproute2 and /dev/net/tun
	TROUPE_CHAOS=$(TROUPE_CHAOS) $(GO) test -count=1 -timeout 24h -v -run 'TestWire|TestChaos$$' ./benchmarks/chaos

verify: lint test race ## lint, test and race

clean: ## remove what was built
	rm -rf bin dist .venv python/troupe/bin python/build python/*.egg-info
