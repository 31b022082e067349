# dcpd: one Makefile, non-recursive. `make help` lists the targets.
#
#   V=1                          show the commands
#   SAN=address|undefined|thread build with a sanitizer (objects in a tree of their own)
#   FAULTS=1                     compile the fault points in (worker/os/fs.h)
#   FUZZ=1 CC=clang              libFuzzer's instrumentation, ASan, UBSan and fault points: what check-san and fuzz build
#   DCPD_RETRY=1                 a test that fails is run once more, and listed as flaky if it passes then
#   LONG=1                       make check runs the tests marked `long` too
#   SETS=N                       make check runs N sets of tests at a time (6)
#   PURE=1 IMAGE=NAME            make wheel: Python alone; make sbom: of an image too
#   JOBS=N T=WORD KEEP=1 REQUESTS=N PREFIX=/usr/local DESTDIR= FUZZ_SECONDS=60 SAN_SECONDS=5 DCPD_TEST_VENV=DIR

.DEFAULT_GOAL := all
SHELL := /bin/bash
comma := ,
empty :=
space := $(empty) $(empty)
Q := $(if $(V),,@)
say = $(if $(V),@:,@printf '  %-8s %s\n')

VARIANT := $(if $(FUZZ),fuzz,$(if $(SAN),$(SAN),release)$(if $(FAULTS),-faults))
O := build/obj/$(VARIANT)
BIN := $(if $(filter release,$(VARIANT)),build/bin,build/$(VARIANT)/bin)
LIB := $(if $(filter release,$(VARIANT)),build/lib,build/$(VARIANT)/lib)
TESTBIN := build/test/$(VARIANT)

CC ?= gcc
PKGS := libmicrohttpd libevent libevent_pthreads jansson sqlite3 liburing libxxhash libisal zlib libzstd \
        libseccomp libpcre2-8 libsystemd libcurl libacl libsodium expat libcrypto
PKG_CFLAGS = $(eval PKG_CFLAGS := $$(shell pkg-config --cflags $(PKGS) 2>/dev/null))$(PKG_CFLAGS)
WARN := -Wall -Wextra -Werror -Wshadow -Wconversion -Wno-sign-conversion -Wstrict-prototypes -Wmissing-prototypes \
        -Wundef -Wvla -Wformat=2 -Wnull-dereference
HARDEN := -fstack-protector-strong -fstack-clash-protection -fno-omit-frame-pointer
# Programs and libdcp.so share the objects: without interposition PIC costs them nothing.
PIC := -fPIC -fno-semantic-interposition
SANFLAGS := $(if $(SAN),-fsanitize=$(SAN) -fno-sanitize-recover=all)
ifdef FUZZ # clang only. Sources ask for gcc's macro; gcc's build is the one with the warnings
FAULTS := 1
CFLAGS ?= -O1 -g
SANFLAGS := -fsanitize=fuzzer-no-link,address,undefined -fno-sanitize-recover=all -w -D__SANITIZE_ADDRESS__
endif
FORTIFY := $(if $(SAN)$(FUZZ),,-D_FORTIFY_SOURCE=2)
VERSION := $(shell cat VERSION 2>/dev/null || echo 0.0.0)
CFLAGS ?= -O2 -g
PREFIX ?= /usr/local
LIBDIR ?= $(PREFIX)/lib
ALL_CFLAGS = -std=gnu17 -D_GNU_SOURCE $(CFLAGS) $(WARN) $(HARDEN) $(PIC) $(FORTIFY) $(SANFLAGS) -pthread -MMD -MP \
             -Iworker -I. -Itests -DDCPD_VERSION='"$(VERSION)"' $(if $(FAULTS),-DDCPD_FAULTS) $(PKG_CFLAGS)
LDFLAGS_ALL = -pie -Wl,-z,relro,-z,now -rdynamic $(SANFLAGS) -pthread $(LDFLAGS)
ENGINE_LIBS := -levent -lcurl -lexpat -lcrypto -lsodium -lxxhash -lisal -lz -lzstd -luring -lseccomp -ljansson -lpcre2-8 -lacl -lm
DAEMON_LIBS := -lmicrohttpd -levent -levent_pthreads -lsqlite3 -lsystemd $(ENGINE_LIBS)
# dcpd and dcpd-worker open libcurl at the first call.
CURL_LATE := worker/os/curl_late.c
CLIB_LIBS := $(filter-out -lseccomp,$(ENGINE_LIBS))
CTL_LIBS := $(ENGINE_LIBS)

# The C library: the shared one, and the archive that is installed. build/lib/libdcp.a is the whole engine, for our programs.
CLIB := $(LIB)/libdcp.so.0 $(LIB)/static/libdcp.a
ENGINE_SRC := $(filter-out $(CURL_LATE),$(wildcard worker/*/*.c))
DAEMON_SRC := $(filter-out server/main.c,$(wildcard server/*.c api/*.c))
CTL_SRC := $(filter-out api/cli/main.c,$(wildcard api/cli/*.c))
obj = $(patsubst %.c,$(O)/%.o,$(1))
GEN := build/gen
JOBS ?= $(shell nproc)
ASSETS := $(sort $(shell find web api/openapi.yaml api/transforms -type f 2>/dev/null))

##@ Start here
BUILD_DEBS := gcc libc6-dev make pkg-config libmicrohttpd-dev libevent-dev libjansson-dev libsqlite3-dev liburing-dev \
              libxxhash-dev libisal-dev zlib1g-dev libzstd-dev libseccomp-dev libpcre2-dev libsystemd-dev \
              libcurl4-openssl-dev libacl1-dev libsodium-dev libexpat1-dev libssl-dev
TEST_DEBS := g++ locales libcmocka-dev python3 python3-venv python3-yaml strace chromium-headless-shell zsh fish curl openssl etcd-server
BENCH_DEBS := chromium fio iperf3 rclone wrk zstd python3 python3-venv
DEB_DEBS := debhelper dh-python dpkg-dev fakeroot
DEPLOY_DEBS := lintian debootstrap systemd-container
SLURM_DEBS := munge slurmctld slurmd slurm-client
WHEEL_DEBS := binutils patchelf dpkg python3
FUZZ_DEBS := clang libclang-rt-14-dev

.PHONY: quickstart
quickstart: ## install, build, and see dcpd do its main job on a PyTorch checkpoint (KEEP=1 leaves it running)
	$(Q)$(MAKE) --no-print-directory deps
	$(Q)$(MAKE) --no-print-directory -j$(JOBS) all $(TESTBIN)/tools/fill
	$(Q)BIN=$(BIN) FILL=$(TESTBIN)/tools/fill KEEP=$(KEEP) deploy/quickstart.sh

.PHONY: deps
deps: ## install from Debian what building needs, if it is missing
	$(Q)deploy/deps.sh $(BUILD_DEBS)

.PHONY: deps-test
deps-test: ## the same for the tests, and PyTorch and promtool into a cache folder of yours
	$(Q)deploy/deps.sh $(TEST_DEBS)
	$(Q)tests/venv.sh >/dev/null
	$(Q)for x in s3 deploy; do tests/venv.sh tests/lib/requirements-$$x.txt >/dev/null || exit 1; done
	$(Q)tests/promtool.sh >/dev/null

##@ Build
.PHONY: all
all: $(BIN)/dcpd $(BIN)/dcpd-worker $(BIN)/dcpctl $(LIB)/libdcp.a $(CLIB) ## build the daemon, the worker, dcpctl and the C library

# Objects of other flags than these are made again: the file changes when the flags do.
.PHONY: flags
$(O)/.flags: flags
	@mkdir -p $(@D)
	@echo '$(subst ','\'',$(ALL_CFLAGS))' | cmp -s - $@ || echo '$(subst ','\'',$(ALL_CFLAGS))' >$@

$(O)/%.o: %.c $(O)/.flags
	$(say) CC $<
	@mkdir -p $(@D)
	$(Q)$(CC) $(ALL_CFLAGS) -c $< -o $@

$(O)/gen/%.o: $(GEN)/%.c $(O)/.flags
	$(say) CC $<
	@mkdir -p $(@D)
	$(Q)$(CC) $(ALL_CFLAGS) -c $< -o $@

# The kernel is part of the source as code that a driver loads, so that a build needs no toolkit: PTX, whose first line names its sources, and a
# fat binary of the same PTX and of machine code for some architectures.
PTX := worker/device/gather.ptx
PTX_OF := worker/device/gather.h worker/device/gather_cast.h worker/tensor/small_float.h worker/device/gather.cu
FATBIN := worker/device/gather.fatbin
GPU_ARCHS := 80 90 100
CUDA_BIN ?= /usr/local/cuda/bin
$(O)/worker/device/cuda_gather.o: $(FATBIN) $(PTX)
.PHONY: gpu-code
gpu-code: ## make the kernels' PTX and fat binary anew (clang 14 or newer, which knows GPUs; ptxas and fatbinary in CUDA_BIN=DIR)
	$(Q){ echo "// of $$(cat $(PTX_OF) | sha256sum | cut -c 1-64)"; clang --cuda-device-only --cuda-gpu-arch=sm_80 -nocudainc -nocudalib \
	  -Wno-unknown-cuda-version -Xclang -target-feature -Xclang +ptx70 -std=gnu++17 -O2 -Iworker -S -o - worker/device/gather.cu; } >$(PTX).new
	$(Q)mv $(PTX).new $(PTX)
	$(Q)$(call fatbin_to,$(FATBIN))
# Uncompressed: a driver need not unpack it, and its PTX can be read.
fatbin_to = d=$$(mktemp -d) && for a in $(GPU_ARCHS); do $(CUDA_BIN)/ptxas -arch=sm_$$a -o $$d/sm_$$a $(PTX) || exit 1; done && \
	  $(CUDA_BIN)/fatbinary -64 --compress-mode=none --create=$(1) --image3=kind=ptx,sm=$(firstword $(GPU_ARCHS)),file=$(PTX) \
	    $(foreach a,$(GPU_ARCHS),--image3=kind=elf,sm=$(a),file=$$d/sm_$(a)) && rm -r $$d

# The page and the API's contract are part of the binary: .incbin needs no tool but the assembler.
$(GEN)/assets.c: $(ASSETS) Makefile
	$(say) GEN $@
	@mkdir -p $(@D)
	$(Q){ echo '/* made by the Makefile from web/, api/openapi.yaml and api/transforms/ */'; echo '#include "api/assets.h"'; i=0; \
	  for f in $(ASSETS); do \
	    printf '__asm__(".section .rodata\\n.balign 16\\nasset_%d: .incbin \\"%s\\"\\nasset_end_%d: .byte 0\\n.previous\\n");\n' $$i $$f $$i; \
	    echo "extern const unsigned char asset_$$i[], asset_end_$$i[];"; i=$$((i+1)); done; \
	  echo 'const struct asset assets[] = {'; i=0; \
	  for f in $(ASSETS); do echo "	{ \"$$f\", asset_$$i, asset_end_$$i },"; i=$$((i+1)); done; \
	  echo '	{ 0, 0, 0 },'; echo '};'; } > $@

$(LIB)/libdcp.a: $(call obj,$(ENGINE_SRC))
	$(say) AR $@
	@mkdir -p $(@D)
	$(Q)rm -f $@ && ar rcs $@ $^

$(LIB)/libdcp.so.0: $(call obj,api/c/dcp.c) $(LIB)/libdcp.a api/c/dcp.map
	$(say) LINK $@
	@mkdir -p $(@D)
	$(Q)$(CC) -shared -Wl,-soname,libdcp.so.0,--version-script=api/c/dcp.map,-z,relro,-z,now,--gc-sections,--as-needed \
	  $(if $(SANFLAGS),$(SANFLAGS),-Wl$(comma)-z$(comma)defs) -pthread $(LDFLAGS) -o $@ $(filter %.o %.a,$^) $(CLIB_LIBS)

# One object in which only the API's names are global: the engine's cannot meet those of the program that it is linked into.
$(LIB)/static/libdcp.a: $(call obj,api/c/dcp.c) $(LIB)/libdcp.a api/c/dcp.map
	$(say) AR $@
	@mkdir -p $(@D)
	$(Q)rm -f $@ && ld -r -o $(@D)/dcp.o $(filter %.o %.a,$^) && \
	  objcopy $$(sed -n 's/^\t\t\(dcp_[a-z_]*\);/--keep-global-symbol=\1/p' api/c/dcp.map) $(@D)/dcp.o && ar rcs $@ $(@D)/dcp.o && rm $(@D)/dcp.o

$(LIB)/libdcpd.a: $(call obj,$(DAEMON_SRC)) $(O)/gen/assets.o
	$(say) AR $@
	@mkdir -p $(@D)
	$(Q)rm -f $@ && ar rcs $@ $^

$(BIN)/dcpd: $(call obj,server/main.c $(CURL_LATE)) $(LIB)/libdcpd.a $(LIB)/libdcp.a
	$(say) LINK $@
	@mkdir -p $(@D)
	$(Q)$(CC) $(LDFLAGS_ALL) -o $@ $^ $(filter-out -lcurl,$(DAEMON_LIBS))

$(BIN)/dcpd-worker: $(call obj,worker/main.c $(CURL_LATE)) $(LIB)/libdcp.a
	$(say) LINK $@
	@mkdir -p $(@D)
	$(Q)$(CC) $(LDFLAGS_ALL) -o $@ $^ $(filter-out -lcurl,$(ENGINE_LIBS))

# Its text is inside.
$(O)/api/cli/explain.o: api/errors.md

$(BIN)/dcpctl: $(call obj,api/cli/main.c $(CTL_SRC)) $(LIB)/libdcp.a
	$(say) LINK $@
	@mkdir -p $(@D)
	$(Q)$(CC) $(LDFLAGS_ALL) -o $@ $^ $(CTL_LIBS)

# The daemon and its worker as of a later version, for tests of clusters in an upgrade: dcpd speaks this version's protocol, dcpd-protocol-2
# a later one. What names version or protocol is compiled anew; the rest comes out of the archives.
NEXT := $(TESTBIN)/next
NEXT_VERSION = $(eval NEXT_VERSION := $$(shell grep -lE 'DCPD_VERSION|BUILD_ID' $(DAEMON_SRC)))$(NEXT_VERSION)
NEXT_WORKER = $(eval NEXT_WORKER := $$(shell grep -lE 'DCPD_VERSION|BUILD_ID' $(ENGINE_SRC)))$(NEXT_WORKER)
NEXT_PROTOCOL = $(eval NEXT_PROTOCOL := $$(shell grep -l CLUSTER_PROTOCOL $(DAEMON_SRC)))$(NEXT_PROTOCOL)
next = $(patsubst %.c,$(O)/next-$(1)/%.o,$(2))
NEXT_FLAGS = -UDCPD_VERSION -DDCPD_VERSION='"99.0.0"'
$(O)/next-1/%.o: %.c $(O)/.flags
	$(say) CC $<
	@mkdir -p $(@D)
	$(Q)$(CC) $(ALL_CFLAGS) $(NEXT_FLAGS) -c $< -o $@

$(O)/next-2/%.o: %.c $(O)/.flags
	$(say) CC $<
	@mkdir -p $(@D)
	$(Q)$(CC) $(ALL_CFLAGS) $(NEXT_FLAGS) -DCLUSTER_PROTOCOL=2 -c $< -o $@

$(NEXT)/dcpd: $(call next,1,server/main.c $(NEXT_VERSION))
$(NEXT)/dcpd-protocol-2: $(call next,1,server/main.c $(filter-out $(NEXT_PROTOCOL),$(NEXT_VERSION))) $(call next,2,$(NEXT_PROTOCOL))
$(NEXT)/dcpd $(NEXT)/dcpd-protocol-2: $(call obj,$(CURL_LATE)) $(LIB)/libdcpd.a $(LIB)/libdcp.a
	$(say) LINK $@
	@mkdir -p $(@D)
	$(Q)$(CC) $(LDFLAGS_ALL) -o $@ $(filter %.o,$^) $(filter %.a,$^) $(filter-out -lcurl,$(DAEMON_LIBS))

$(NEXT)/dcpd-worker: $(call next,1,worker/main.c $(NEXT_WORKER)) $(call obj,$(CURL_LATE)) $(LIB)/libdcp.a
	$(say) LINK $@
	@mkdir -p $(@D)
	$(Q)$(CC) $(LDFLAGS_ALL) -o $@ $(filter %.o,$^) $(filter %.a,$^) $(filter-out -lcurl,$(ENGINE_LIBS))

TOOLS := $(addprefix $(NEXT)/,dcpd dcpd-protocol-2 dcpd-worker) $(patsubst tests/tools/%.c,$(TESTBIN)/tools/%,$(wildcard tests/tools/*.c))
$(TESTBIN)/tools/%: $(O)/tests/tools/%.o $(LIB)/libdcp.a
	$(say) LINK $@
	@mkdir -p $(@D)
	$(Q)$(CC) $(LDFLAGS_ALL) -o $@ $^ $(CTL_LIBS)


BENCHES := $(patsubst tests/bench/%.c,$(TESTBIN)/bench/%,$(wildcard tests/bench/*.c))
$(TESTBIN)/bench/%: $(O)/tests/bench/%.o $(LIB)/libdcp.a
	$(say) LINK $@
	@mkdir -p $(@D)
	$(Q)$(CC) $(LDFLAGS_ALL) -o $@ $^ -lmicrohttpd $(ENGINE_LIBS)

# A driver and an NCCL without GPUs. They keep the real names, so that what loads the real ones loads them, from LD_LIBRARY_PATH.
# Two are preloaded: libhost (a wall clock that jumps, a kernel that lacks things, a file system that is slow), libmemory (allocations fail).
FAKES := $(addprefix build/test/fakes/,libcuda.so.1 libnccl.so.2 libhost.so libmemory.so)
build/test/fakes/libhost.so: tests/fakes/libhost.c
build/test/fakes/libmemory.so: tests/fakes/libmemory.c
build/test/fakes/libcuda.so.1: tests/fakes/libcuda.c tests/fakes/libcuda_stream.c tests/fakes/libcuda_impl.h worker/device/gather.h worker/device/gather_cast.h
build/test/fakes/libnccl.so.2: tests/fakes/libnccl.c worker/comm/nccl_abi.h
$(FAKES): tests/fakes/fake_cuda.h worker/device/cuda_abi.h
	$(say) FAKE $@
	@mkdir -p $(@D)
	$(Q)$(if $(FUZZ),gcc,$(CC)) -std=gnu17 -D_GNU_SOURCE -O1 -g -Wall -Wextra -Werror -fPIC -shared -Iworker -Itests -Wl,-soname,$(@F) -o $@ $(filter %.c,$^)

.PHONY: tools
tools: $(TOOLS) $(BENCHES) $(FAKES) ## build the programs that tests and bench use

compile_commands.json: $(O)/.flags ## how each C file is compiled, for editors and clang's tools
	$(say) GEN $@
	$(Q)flags=$$(sed 's/ -MMD -MP//; s/[\\"]/\\&/g' $(O)/.flags); sep='['; { for f in $$(find worker server api tests -name '*.c' | sort); do \
	  printf '%s\n{"directory": "%s", "file": "%s", "command": "%s"}' "$$sep" '$(CURDIR)' "$$f" "$(CC) $$flags -c $$f"; sep=,; done; \
	  printf '\n]\n'; } >$@

.PHONY: wheel
wheel: $(if $(PURE),,all) ## build/wheel/dcpd-*.whl: the Python package with the programs and their libraries inside (PURE=1: Python alone)
	$(Q)$(if $(PURE),:,deploy/deps.sh $(WHEEL_DEBS))
	$(Q)rm -rf build/wheel && mkdir -p build/wheel
	$(Q)export PYTHONDONTWRITEBYTECODE=1; $(if $(PURE),cd api/python && python3 -c "import backend; backend.build_wheel('../../build/wheel')",\
	  deploy/wheel.py $(BIN) build/wheel >/dev/null)
	@ls build/wheel/*.whl

.PHONY: sbom
sbom: all ## build/sbom/*.cdx.json: what the programs are linked with, and what is in an image (IMAGE=NAME)
	$(Q)mkdir -p build/sbom && deploy/sbom.py dcpd $(BIN)/dcpd $(BIN)/dcpd-worker $(BIN)/dcpctl >build/sbom/dcpd.cdx.json
	$(Q)$(if $(IMAGE),docker run --rm --entrypoint dpkg-query $(IMAGE) -W -f '$${Package}\t$${Version}\t$${Architecture}\n' | \
	  deploy/sbom.py $(IMAGE) - >build/sbom/image.cdx.json)
	@ls build/sbom/*

.PHONY: install
install: all ## install under PREFIX (default /usr/local), below DESTDIR
	$(Q)install -D -t $(DESTDIR)$(PREFIX)/bin $(BIN)/dcpd $(BIN)/dcpd-worker $(BIN)/dcpctl
	$(Q)install -D -m 644 -t $(DESTDIR)$(LIBDIR) $(CLIB)
	$(Q)ln -sf libdcp.so.0 $(DESTDIR)$(LIBDIR)/libdcp.so
	$(Q)install -D -m 644 -t $(DESTDIR)$(PREFIX)/include api/c/dcp.h
	$(Q)install -d $(DESTDIR)$(LIBDIR)/pkgconfig
	$(Q)sed 's|@PREFIX@|$(PREFIX)|; s|@LIBDIR@|$(LIBDIR)|; s|@VERSION@|$(VERSION)|; s|@PRIVATE@|$(CLIB_LIBS)|' api/c/dcp.pc.in \
	  >$(DESTDIR)$(LIBDIR)/pkgconfig/dcp.pc
	$(Q)install -D -m 644 -t $(DESTDIR)$(PREFIX)/share/doc/dcpd README.md $(wildcard api/openapi.yaml api/*.md deploy/tuning.md)
	$(Q)install -D -m 644 -t $(DESTDIR)$(PREFIX)/share/dcpd/transforms api/transforms/*.json
	$(Q)install -D -m 644 -t $(DESTDIR)$(PREFIX)/share/doc/dcpd/examples api/c/examples/*.c
	$(Q)install -d $(addprefix $(DESTDIR)$(PREFIX)/share/,man/man1 man/man5 man/man8 bash-completion/completions zsh/site-functions fish/vendor_completions.d)
	$(Q)$(BIN)/dcpctl manual >$(DESTDIR)$(PREFIX)/share/man/man1/dcpctl.1
	$(Q)$(BIN)/dcpd --manual 8 >$(DESTDIR)$(PREFIX)/share/man/man8/dcpd.8
	$(Q)$(BIN)/dcpd --manual 5 >$(DESTDIR)$(PREFIX)/share/man/man5/dcpd.conf.5
	$(Q)$(BIN)/dcpctl completion bash >$(DESTDIR)$(PREFIX)/share/bash-completion/completions/dcpctl
	$(Q)$(BIN)/dcpctl completion zsh >$(DESTDIR)$(PREFIX)/share/zsh/site-functions/_dcpctl
	$(Q)$(BIN)/dcpctl completion fish >$(DESTDIR)$(PREFIX)/share/fish/vendor_completions.d/dcpctl.fish
	$(Q)for f in $(wildcard deploy/*.service deploy/*.socket); do install -D -m 644 -t $(DESTDIR)$(PREFIX)/lib/systemd/system $$f; done
	$(Q)install -D -m 644 deploy/dcpd.sysusers.conf $(DESTDIR)$(PREFIX)/lib/sysusers.d/dcpd.conf
	$(Q)install -D -m 644 deploy/dcpd.tmpfiles.conf $(DESTDIR)$(PREFIX)/lib/tmpfiles.d/dcpd.conf
	$(Q)install -D -m 644 -t $(DESTDIR)$(PREFIX)/share/dcpd deploy/prometheus/rules.yml deploy/grafana/dcpd.json deploy/dcpd-gpu.conf
	$(Q)for f in $(wildcard deploy/dcpd.conf); do install -D -m 644 -t $(DESTDIR)$(PREFIX)/share/dcpd $$f; done

# Debian's tools want a folder debian/: one is made of deploy/debian and of the files that systemd hosts without packages use.
DEB := build/deb/dcpd
.PHONY: deb
deb: ## Debian packages of dcpd, libdcp and the Python client, in build/deb
	$(Q)deploy/deps.sh $(BUILD_DEBS) $(DEB_DEBS)
	$(Q)rm -rf build/deb && mkdir -p $(DEB) && cp -r deploy/debian $(DEB)/
	$(Q)cp deploy/dcpd.conf $(DEB)/
	$(Q)cp deploy/dcpd.service deploy/dcpd.socket $(DEB)/debian/
	$(Q)cp deploy/dcpd.sysusers.conf $(DEB)/debian/dcpd.sysusers
	$(Q)cp deploy/dcpd.tmpfiles.conf $(DEB)/debian/dcpd.tmpfiles
	$(Q)sed -i 's|@BUILD_DEBS@|$(subst $(space),$(comma) ,$(filter-out gcc libc6-dev make,$(BUILD_DEBS)))|' $(DEB)/debian/control
	$(Q)cat deploy/debian/copyright LICENCES.md >$(DEB)/debian/copyright
	$(Q)printf 'dcpd (%s) unstable; urgency=medium\n\n  * See CHANGELOG.md.\n\n -- dcpd maintainers <maintainers@dcpd.example>  %s\n' '$(VERSION)' \
	  "$$(date -R -u -d @$${SOURCE_DATE_EPOCH:-$$(date +%s)})" >$(DEB)/debian/changelog
	$(Q)cd $(DEB) && TOP='$(CURDIR)' CC='$(CC)' MAKEFLAGS= dpkg-buildpackage -us -uc -b >../build.log 2>&1 || { tail -30 ../build.log; exit 1; }
	$(Q)cd build/deb && ls *.deb

.PHONY: clean
clean: ## remove what was built
	rm -rf build

##@ Test
# One interpreter for many Python tests: importing PyTorch and starting ranks is what costs. What tests leave goes when they have passed.
PYTEST = BIN=$(abspath $(BIN)) TESTBIN=$(abspath $(TESTBIN)) PYTHONDONTWRITEBYTECODE=1 $(if $(filter torch% package%,$*),WARM=build/test/warm) \
         $$(tests/venv.sh)/bin/python $(if $(filter torch% package%,$*),tests/lib/warm.py,-m pytest) -q \
         -o tmp_path_retention_policy=failed -o cache_dir=$(abspath build/test/pytest) $(if $(T),-k '$(T)')
PYTESTS := $(wildcard tests/worker tests/api tests/interop tests/fault tests/e2e)
FLAKY := build/test/flaky
FAILED := build/test/failed
# Given pytest's arguments. With DCPD_RETRY=1, five failures at most are run once more. Tests do not see it: dcpd refuses variables that it
# does not know.
unexport DCPD_RETRY
retrying = RETRY=$(DCPD_RETRY) $(if $(filter-out $(ON_DISK),$*),IN_MEMORY=1) tests/retry.sh $(FLAKY) $(FAILED) env $(PYTEST) $(1)
# The end of a recipe: what was flaky or failed is named once more, below all that the sets of tests said.
summary = rc=$$?; \
	  if [ -s $(FLAKY) ]; then echo 'FLAKY, to be worked off:'; sed 's/^/  /' $(FLAKY); fi; \
	  if [ -s $(FAILED) ]; then echo 'FAILED, see above:'; sed 's/^/  /' $(FAILED); fi; exit $$rc
QUICK = -m 'not slow$(if $(LONG),, and not long$(if $(SAN)$(FUZZ)$(FAULTS),, and not many))'

# Much of a test is waiting: so these run side by side, and three unit tests at a time beside them. Each says what it has to say when it
# has ended. What an interpreter imports and starts costs, so there are few; the package's tests need some of their own, see there.
# Where the disk matters (the worker by itself, faults, sizes of blocks, the page cache) sets have their files there, like the unit tests;
# the others have them in memory: see tests/retry.sh.
ON_DISK := worker fault torch1 package3 api3 api4
STREAMS := torch1 torch2 package1 package2 s3 cluster package3 worker api5 api3 api2 api1 api4 fault page
SETS ?= 6
# Tests of the API that need PyTorch are where it is imported anyhow.
API_TORCH := $(wildcard $(patsubst %,tests/api/test_%.py,checkpoint_input holds locate neighbours publish_nodes replicate trust))
# One object storage for all that is asked of one.
STREAM_s3 := $(wildcard tests/api/test_s3*.py tests/worker/test_s3*.py)
# Waits for leases, mostly.
STREAM_cluster := $(wildcard tests/api/test_cluster*.py)
STREAM_api1 := $(filter-out $(API_TORCH) $(STREAM_cluster),$(wildcard tests/api/test_[a-c]*.py))
STREAM_api2 := $(filter-out $(API_TORCH),$(wildcard tests/api/test_[d-l]*.py))
STREAM_api3 := $(filter-out $(API_TORCH),$(wildcard tests/api/test_[m-o]*.py))
STREAM_api4 := $(filter-out $(API_TORCH),$(wildcard tests/api/test_[p-r]*.py))
STREAM_api5 := $(filter-out $(API_TORCH) $(STREAM_cluster) $(STREAM_api1) $(STREAM_api2) $(STREAM_api3) $(STREAM_api4) $(STREAM_s3),$(wildcard tests/api/test_*.py))
STREAM_worker := $(filter-out $(STREAM_s3),$(wildcard tests/worker/test_*.py))
STREAM_fault := $(wildcard tests/fault)
STREAM_page := $(wildcard tests/e2e)
STREAM_torch1 := $(API_TORCH) $(wildcard tests/interop/test_[a-l]*.py)
STREAM_torch2 := $(filter-out $(STREAM_torch1),$(wildcard tests/interop/test_*.py))
STREAM_package1 := $(wildcard tests/python/test_[f-l]*.py)
STREAM_package2 := $(wildcard tests/python/test_[m-z]*.py)
STREAM_package3 := $(filter-out $(STREAM_package1) $(STREAM_package2),$(wildcard tests/python/test_*.py))

.PHONY: check
check: ## what a change must pass: installs, builds, runs (four to five minutes on 2 cores once built; LONG=1 for more)
	$(Q)$(MAKE) --no-print-directory deps deps-test
	$(Q)$(MAKE) --no-print-directory -j$(JOBS) all tools $(UNIT)
	@mkdir -p $(dir $(FAILED)); rm -f $(FLAKY) $(FAILED)
	@echo 'Tests, side by side: $(STREAMS) tidy units. Each shows what came of it when it has ended.'
	$(Q)$(MAKE) --no-print-directory -k -O -j$(SETS) check-units $(STREAMS:%=check-stream-%) check-tidy check-abi; $(summary)

.PHONY: check-tidy $(STREAMS:%=check-stream-%)
check-tidy: ; $(Q)$(MAKE) --no-print-directory tidy || { echo tidy >>$(FAILED); exit 1; }
$(STREAMS:%=check-stream-%): check-stream-%: all tools
	@echo; echo "$*: $(STREAM_$*)"
	$(Q)$(call retrying,$(QUICK) $(STREAM_$*))

.PHONY: check-full
check-full: ## everything: more PyTorch versions, 8 GiB reshards, hundreds of kills (hours)
	$(Q)$(MAKE) --no-print-directory deps deps-test
	$(Q)$(MAKE) --no-print-directory -j$(JOBS) all tools
	$(Q)$(MAKE) --no-print-directory tidy
	$(Q)DCPD_FULL=1 $(MAKE) --no-print-directory -j$(JOBS) check-unit
	$(Q)DCPD_FULL=1 $(PYTEST) $(PYTESTS)
	$(Q)DCPD_FULL=1 $(PYTEST) tests/python
	$(Q)DCPD_FULL=1 $(MAKE) --no-print-directory check-san SAN_SECONDS=60
	$(Q)$(MAKE) --no-print-directory check-fresh

.PHONY: check-fresh
check-fresh: ## quickstart and check in a bare Debian 12 that debootstrap makes, from a tree that is no repository (needs root)
	$(Q)tests/fresh.sh

.PHONY: check-deploy
check-deploy: ## packages and wheel in a clean Debian 12, dcpd under systemd, the containers over an engine that is fetched where none answers (needs root)
	$(Q)$(MAKE) --no-print-directory deb wheel
	$(Q)deploy/deps.sh $(DEPLOY_DEBS)
	$(Q)lintian --allow-root --fail-on error,warning build/deb/*.changes
	$(Q)tests/e2e/deb.sh
	$(Q)tests/e2e/wheel.sh
	$(Q)DOCKER_START=1 $(PYTEST) -rsP tests/e2e/test_deploy.py

.PHONY: check-slurm
check-slurm: all ## prolog, epilog and job script of deploy/slurm under Debian's Slurm on loopback (needs root; where it is not to be had, it skips)
	$(Q)deploy/deps.sh $(SLURM_DEBS)
	$(Q)$(PYTEST) -rs tests/e2e/test_slurm.py

.PHONY: check-contract
REQUESTS ?= 100000
check-contract: all tools ## openapi.yaml tried by schemathesis: all checks, edges, sequences, REQUESTS=100000 at least (an hour)
	$(Q)DCPD_CONTRACT_REQUESTS=$(REQUESTS) $(PYTEST) -s tests/api/test_contract.py

.PHONY: tidy
tidy: $(LIB)/libdcp.a $(LIB)/libdcpd.a ## the house rules: who includes whom, names, sizes, banned calls, error codes
	$(Q)LIB=$(LIB) python3 tests/tidy.py

.PHONY: check-cluster
check-cluster: all tools ## daemons of a cluster over a real etcd (Debian's etcd-server; without it they skip), and a campaign of faults: CAMPAIGN_ROUNDS=30 CAMPAIGN_SEED=17
	$(Q)$(PYTEST) $(STREAM_cluster)
	$(Q)$(MAKE) --no-print-directory FAULTS=1 check-cluster-faults

.PHONY: check-cluster-faults
check-cluster-faults: all tools
	$(Q)$(PYTEST) -s $(wildcard tests/fault/test_cluster_*.py)

.PHONY: check-worker check-api check-interop check-fault check-e2e check-python
check-worker check-api check-interop check-fault check-e2e check-python: check-%: all tools
	$(Q)$(PYTEST) -m 'not slow' tests/$*
check-worker: ## the worker by itself: jobs, and input that is wrong (SAN=address works here)
check-api: ## the HTTP API and dcpctl over a real daemon, bad input too (T=WORD picks tests)
check-interop: ## real PyTorch, both ways
check-fault: ## kills and memory bounds, short form
check-e2e: ## the dashboard in Chromium
check-python: ## the Python package, with real PyTorch and several ranks

UNIT := $(patsubst tests/unit/%.c,$(TESTBIN)/%,$(wildcard tests/unit/test_*.c))
UNIT := $(if $(FAULTS),$(UNIT),$(filter-out %/test_fault_points,$(UNIT)))
# dcpctl's modules are in no library.
$(TESTBIN)/test_cli_%: $(O)/tests/unit/test_cli_%.o $(call obj,$(CTL_SRC)) $(LIB)/libdcp.a
	$(say) LINK $@
	@mkdir -p $(@D)
	$(Q)$(CC) $(LDFLAGS_ALL) -o $@ $^ -lcmocka $(CTL_LIBS)
# The worker's jobs and the coordinator's are two modules of one name: who tests the first links without the second.
OPS_TESTS := hostile_memory build_files build_diff build_sources checkpoint commit dcp_ops exec read_plan locate lookup_kept lookup_scan manifest past_cache plan_sound run spec_layout spec_select spool store_jobs trash wave
$(OPS_TESTS:%=$(TESTBIN)/test_%): $(TESTBIN)/test_%: $(O)/tests/unit/test_%.o $(LIB)/libdcp.a
	$(say) LINK $@
	@mkdir -p $(@D)
	$(Q)$(CC) $(LDFLAGS_ALL) -o $@ $^ -lcmocka $(ENGINE_LIBS)
$(TESTBIN)/test_%: $(O)/tests/unit/test_%.o $(call obj,$(wildcard tests/lib/*.c)) $(LIB)/libdcpd.a $(LIB)/libdcp.a
	$(say) LINK $@
	@mkdir -p $(@D)
	$(Q)$(CC) $(LDFLAGS_ALL) -o $@ $^ -lcmocka $(DAEMON_LIBS)
# Members that are threads share one mapping: see there.
$(TESTBIN)/test_comm_threads: LDFLAGS_ALL += -Wl,--wrap=mmap,--wrap=munmap
# An fsync that fails as the test says.
$(TESTBIN)/test_commit: LDFLAGS_ALL += -Wl,--wrap=fsync
$(TESTBIN)/test_fence: LDFLAGS_ALL += -Wl,--wrap=fsync,--wrap=unlinkat
# A file system without O_DIRECT, and files that are not in the page cache.
$(TESTBIN)/test_past_cache: LDFLAGS_ALL += -Wl,--wrap=pread,--wrap=fs_cached
# A clock that goes as the test says.
$(TESTBIN)/test_locate: LDFLAGS_ALL += -Wl,--wrap=clock_gettime
.PRECIOUS: $(O)/%.o

GPU_TESTS := $(addprefix $(TESTBIN)/test_,device device_import device_gather comm_nccl comm_nccl_errors)
$(GPU_TESTS) check-worker: | $(FAKES)

CUDA_INCLUDE ?= /usr/local/cuda/include
.PHONY: check-abi
check-abi: ## our declarations of CUDA and NCCL beside their headers (CUDA_INCLUDE=DIR), the kernel's code beside its sources
	$(Q)[ "$$(head -1 $(PTX))" = "// of $$(cat $(PTX_OF) | sha256sum | cut -c 1-64)" ] || { echo "$(PTX) is not of its sources: make gpu-code"; exit 1; }
	$(Q)python3 tests/abi/fatbin.py $(FATBIN) $(PTX) $(GPU_ARCHS)
	$(Q)if ! grep -qaF "$$($(CUDA_BIN)/ptxas --version 2>/dev/null | tail -1)" $(FATBIN) || [ ! -x $(CUDA_BIN)/ptxas ]; then \
	  echo "skipped: no ptxas in $(CUDA_BIN) of the version that made $(FATBIN)"; \
	  else mkdir -p $(GEN) && ($(call fatbin_to,$(GEN)/gather.fatbin)) && cmp $(GEN)/gather.fatbin $(FATBIN) || \
	  { echo "$(FATBIN) is not of $(PTX): make gpu-code"; exit 1; }; fi
	$(Q)fail=0; for x in cuda nccl; do \
	  if [ ! -e $(CUDA_INCLUDE)/$$x.h ]; then echo "skipped: no $$x.h in $(CUDA_INCLUDE)"; continue; fi; \
	  $(CC) -std=gnu17 -Wall -Wextra -Werror -fsyntax-only -Iworker -Itests -I$(CUDA_INCLUDE) tests/abi/$${x}_abi.c && echo "ok $${x}_abi" || fail=1; done; exit $$fail

.PHONY: check-gpu gpu-folder
check-gpu: all $(GPU_TESTS) check-abi ## real libcuda and libnccl, and real tensors of torch.cuda saved and loaded with each allocator; skips without a GPU
	$(Q)DCPD_BIN=$(abspath $(BIN))/dcpd PYTHONDONTWRITEBYTECODE=1 python3 tests/gpu/check.py --units $(GPU_TESTS)

gpu-folder: all $(GPU_TESTS) ## build/gpu: check-gpu and bench-gpu for a host that can build nothing: build/gpu/check, build/gpu/bench
	$(Q)deploy/deps.sh $(WHEEL_DEBS)
	$(Q)tests/gpu/folder.sh $(BIN) build/gpu $(GPU_TESTS)

WATCHED := build/test/watched
.PHONY: watch
watch: ## rebuild and run one unit test whenever a C file changes: T=box is tests/unit/test_box.c (Ctrl-C ends it)
	$(Q)test -e tests/unit/test_$(T).c || { echo 'T=NAME of a tests/unit/test_NAME.c'; exit 2; }
	$(Q)mkdir -p $(dir $(WATCHED)); while :; do touch $(WATCHED); $(MAKE) --no-print-directory -j$(JOBS) run-test_$(T); \
	  until [ -n "$$(find worker server api tests -name '*.[ch]' -newer $(WATCHED) -print -quit)" ]; do sleep 0.3; done; done

.PHONY: units
units: $(UNIT) $(TESTBIN)/tools/fake_worker
.PHONY: check-unit check-units $(UNIT:$(TESTBIN)/%=run-%)
check-unit: units check-abi ## the cmocka tests (SAN= works here)
	$(Q)$(MAKE) --no-print-directory -k -O check-units
check-units: $(UNIT:$(TESTBIN)/%=run-%)
$(UNIT:$(TESTBIN)/%=run-%): run-%: $(TESTBIN)/% $(TESTBIN)/tools/fake_worker
	@mkdir -p $(dir $(FLAKY))
	$(Q)run() { out=$$(CMOCKA_TEST_ABORT=$(if $(SAN),1,0) timeout -k 10 600 $< 2>&1); }; \
	  run || { echo "$$out"; echo "FAILED $<"; \
	    if [ "$(DCPD_RETRY)" = 1 ] && run; then echo "FLAKY $*: passed when run again" | tee -a $(FLAKY); \
	    else echo $* >>$(FAILED); exit 1; fi; }; \
	  echo "ok $* $$(grep -c '\[       OK' <<<"$$out") tests"

FUZZERS := $(patsubst tests/fuzz/%.c,$(TESTBIN)/%,$(wildcard tests/fuzz/fuzz_*.c))
FUZZ_SECONDS ?= 60
$(TESTBIN)/fuzz_%: $(O)/tests/fuzz/fuzz_%.o $(LIB)/libdcp.a
	$(say) LINK $@
	@mkdir -p $(@D)
	$(Q)$(CC) -fsanitize=fuzzer $(LDFLAGS_ALL) -o $@ $^ $(ENGINE_LIBS)

# Sanitizers and fault points show what the ordinary build cannot. One build of clang's has all of them: for the unit tests, the worker by
# itself, requests that are wrong, each fault point of the engine, and the fuzz targets.
.PHONY: check-san check-san-run
SAN_SECONDS ?= 5
SAN_TESTS := tests/worker $(patsubst %,tests/fault/test_%.py,fault_points fault_incremental trash_points) \
             tests/interop/test_live_catalogue.py $(patsubst %,tests/api/test_%.py,requests http_basics full_state_dir)
check-san: ## units, worker, wrong requests, fault points, each fuzz target for 5 s, under ASan and UBSan (five minutes on 2 cores once built)
	$(Q)deploy/deps.sh $(BUILD_DEBS) $(FUZZ_DEBS)
	$(Q)$(MAKE) --no-print-directory deps-test
	$(Q)$(MAKE) --no-print-directory -j$(JOBS) FUZZ=1 CC=clang all tools fuzzers units
	@rm -f $(FLAKY) $(FAILED)
	$(Q)$(MAKE) --no-print-directory -k -O -j$(JOBS) FUZZ=1 CC=clang FUZZ_SECONDS=$(SAN_SECONDS) check-san-run; $(summary)
check-san-run: export ASAN_OPTIONS := detect_stack_use_after_return=1
check-san-run: check-units check-san-worker fuzz-run

.PHONY: check-san-worker
check-san-worker: all tools
	$(Q)$(call retrying,$(QUICK) $(SAN_TESTS))

.PHONY: units fuzzers
units: $(UNIT) $(TESTBIN)/tools/fake_worker
fuzzers: $(FUZZERS)

.PHONY: fuzz fuzz-run
fuzz: ## libFuzzer with ASan and UBSan on each tests/fuzz/fuzz_*.c, FUZZ_SECONDS=60 each
	$(Q)deploy/deps.sh $(BUILD_DEBS) $(FUZZ_DEBS)
	$(Q)$(MAKE) --no-print-directory -j$(JOBS) FUZZ=1 CC=clang fuzz-run
fuzz-run: $(FUZZERS)
	$(Q)for f in $(FUZZERS); do n=$${f##*/fuzz_}; mkdir -p build/fuzz/$$n; \
	  seeds=$$([ -d tests/fuzz/seeds/$$n ] && echo tests/fuzz/seeds/$$n); echo "fuzz $$n: $(FUZZ_SECONDS) s"; \
	  $$f -max_total_time=$(FUZZ_SECONDS) -timeout=10 -rss_limit_mb=1024 -max_len=65536 -print_final_stats=1 \
	    -artifact_prefix=build/fuzz/$$n- build/fuzz/$$n $$seeds > build/fuzz/$$n.log 2>&1 \
	    || { tail -40 build/fuzz/$$n.log; exit 1; }; \
	  grep -E 'number_of_executed_units|peak_rss' build/fuzz/$$n.log; done

.PHONY: bench bench-quick bench-scale
bench: ## figures beside PyTorch, fio, memcpy, cp (16 minutes; more on a slow disk), and what became slower (T=WORD picks rows, RECORD=1 keeps the run)
bench-quick: BENCH_ARGS := --quick ## a few of them, in two minutes
bench-quick: export DCPD_BENCH_MIB ?= 256
bench-scale: BENCH_ARGS := --scale ## growth with ranks, chunks, tensors, checkpoints and jobs
bench bench-quick bench-scale:
	$(Q)$(MAKE) --no-print-directory deps
	$(Q)deploy/deps.sh $(BENCH_DEBS)
	$(Q)$(MAKE) --no-print-directory -j$(JOBS) all tools
	$(Q)BIN=$(abspath $(BIN)) TESTBIN=$(abspath $(TESTBIN)) $$(tests/venv.sh)/bin/python tests/bench/run.py \
	  $(BENCH_ARGS) $(if $(RECORD),--record) $(T)

MIB ?= 16384
RUNS ?= 5
.PHONY: bench-gpu
bench-gpu: all ## saves and loads of a GPU's memory beside page-locked copies, dcp.async_save and safetensors, in ten minutes (MIB=16384); skips without a GPU
	$(Q)DCPD_BIN=$(abspath $(BIN))/dcpd PYTHONDONTWRITEBYTECODE=1 python3 tests/bench/gpu.py --mib $(MIB) --runs $(RUNS)

##@ Help
.PHONY: help
help: ## this list
	@awk 'BEGIN{FS=":.*## "} /^##@/{printf "\n%s\n",substr($$0,5)} /^[a-z0-9_.-]+:.*## /{printf "  %-21s %s\n",$$1,$$2}' $(MAKEFILE_LIST)

-include $(shell find build/obj -name '*.d' 2>/dev/null)
