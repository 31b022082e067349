# dcpd: one Makefile, non-recursive. `make help` lists the targets.
#
#   V=1                          show the commands
#   SAN=address|undefined|thread build with a sanitizer (objects in a tree of their own)
#   FAULTS=1                     compile the fault points in (tests/fault)

.DEFAULT_GOAL := all
SHELL := /bin/bash
Q := $(if $(V),,@)
say = $(if $(V),@:,@printf '  %-8s %s\n')

VARIANT := $(if $(SAN),$(SAN),release)$(if $(FAULTS),-faults)
O := build/obj/$(VARIANT)
BIN := $(if $(filter release,$(VARIANT)),build/bin,build/$(VARIANT)/bin)
LIB := $(if $(filter release,$(VARIANT)),build/lib,build/$(VARIANT)/lib)
TESTBIN := build/test/$(VARIANT)

CC ?= gcc
PKGS := libmicrohttpd libevent libevent_pthreads jansson sqlite3 liburing libxxhash libisal zlib libzstd \
        libseccomp libpcre2-8 libsystemd libcurl libacl
PKG_CFLAGS = $(eval PKG_CFLAGS := $$(shell pkg-config --cflags $(PKGS) 2>/dev/null))$(PKG_CFLAGS)
WARN := -Wall -Wextra -Werror -Wshadow -Wconversion -Wno-sign-conversion -Wstrict-prototypes -Wmissing-prototypes \
        -Wundef -Wvla -Wformat=2 -Wnull-dereference
HARDEN := -fstack-protector-strong -fstack-clash-protection -fno-omit-frame-pointer -fPIE
SANFLAGS := $(if $(SAN),-fsanitize=$(SAN) -fno-sanitize-recover=all)
FORTIFY := $(if $(SAN),,-D_FORTIFY_SOURCE=2)
VERSION := $(shell cat VERSION 2>/dev/null || echo 0.0.0)
CFLAGS ?= -O2 -g
ALL_CFLAGS = -std=gnu17 -D_GNU_SOURCE $(CFLAGS) $(WARN) $(HARDEN) $(FORTIFY) $(SANFLAGS) -pthread -MMD -MP \
             -Iworker -I. -Itests -DDCPD_VERSION='"$(VERSION)"' $(if $(FAULTS),-DDCPD_FAULTS) $(PKG_CFLAGS)
LDFLAGS_ALL = -pie -Wl,-z,relro,-z,now -rdynamic $(SANFLAGS) -pthread $(LDFLAGS)
ENGINE_LIBS := -lxxhash -lisal -lz -lzstd -luring -lseccomp -ljansson -lpcre2-8 -lacl -lm
DAEMON_LIBS := -lmicrohttpd -levent -levent_pthreads -lsqlite3 -lsystemd $(ENGINE_LIBS)
CTL_LIBS := -lcurl $(ENGINE_LIBS)

ENGINE_SRC := $(wildcard worker/*/*.c)
DAEMON_SRC := $(filter-out server/main.c,$(wildcard server/*.c api/*.c))
CTL_SRC := $(filter-out api/cli/main.c,$(wildcard api/cli/*.c))
obj = $(patsubst %.c,$(O)/%.o,$(1))
GEN := build/gen
ASSETS := $(sort $(shell find web api/openapi.yaml -type f 2>/dev/null))

##@ Build
.PHONY: all
all: $(BIN)/dcpd $(BIN)/dcpd-worker $(BIN)/dcpctl $(LIB)/libdcp.a ## build the daemon, the worker, dcpctl and libdcp.a

$(O)/%.o: %.c
	$(say) CC $<
	@mkdir -p $(@D)
	$(Q)$(CC) $(ALL_CFLAGS) -c $< -o $@

$(O)/gen/%.o: $(GEN)/%.c
	$(say) CC $<
	@mkdir -p $(@D)
	$(Q)$(CC) $(ALL_CFLAGS) -c $< -o $@

# The page and the API's contract are part of the binary: .incbin needs no tool but the assembler.
$(GEN)/assets.c: $(ASSETS) Makefile
	$(say) GEN $@
	@mkdir -p $(@D)
	$(Q){ echo '/* made by the Makefile from web/ and api/openapi.yaml */'; echo '#include "api/assets.h"'; i=0; \
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

$(LIB)/libdcpd.a: $(call obj,$(DAEMON_SRC)) $(O)/gen/assets.o
	$(say) AR $@
	@mkdir -p $(@D)
	$(Q)rm -f $@ && ar rcs $@ $^

$(BIN)/dcpd: $(call obj,server/main.c) $(LIB)/libdcpd.a $(LIB)/libdcp.a
	$(say) LINK $@
	@mkdir -p $(@D)
	$(Q)$(CC) $(LDFLAGS_ALL) -o $@ $^ $(DAEMON_LIBS)

$(BIN)/dcpd-worker: $(call obj,worker/main.c) $(LIB)/libdcp.a
	$(say) LINK $@
	@mkdir -p $(@D)
	$(Q)$(CC) $(LDFLAGS_ALL) -o $@ $^ $(ENGINE_LIBS)

$(BIN)/dcpctl: $(call obj,api/cli/main.c $(CTL_SRC)) $(LIB)/libdcp.a
	$(say) LINK $@
	@mkdir -p $(@D)
	$(Q)$(CC) $(LDFLAGS_ALL) -o $@ $^ $(CTL_LIBS)

.PHONY: clean
clean: ## remove what was built
	rm -rf build

##@ Test
UNIT := $(patsubst tests/unit/%.c,$(TESTBIN)/%,$(wildcard tests/unit/test_*.c))
$(TESTBIN)/test_%: $(O)/tests/unit/test_%.o $(call obj,$(wildcard tests/lib/*.c)) $(LIB)/libdcpd.a $(LIB)/libdcp.a
	$(say) LINK $@
	@mkdir -p $(@D)
	$(Q)$(CC) $(LDFLAGS_ALL) -o $@ $^ -lcmocka $(DAEMON_LIBS)
.PRECIOUS: $(O)/tests/unit/%.o

.PHONY: check-unit
check-unit: $(UNIT) ## the cmocka tests (SAN= works here)
	$(Q)fail=0; for t in $(UNIT); do \
	  out=$$(CMOCKA_TEST_ABORT=$(if $(SAN),1,0) timeout 120 $$t 2>&1) || { echo "$$out"; echo "FAILED $$t"; fail=1; continue; }; \
	  echo "ok $${t##*/} $$(grep -c '\[       OK' <<<"$$out") tests"; done; exit $$fail

##@ Help
.PHONY: help
help: ## this list
	@awk 'BEGIN{FS=":.*## "} /^##@/{printf "\n%s\n",substr($$0,5)} /^[a-z-]+:.*## /{printf "  %-14s %s\n",$$1,$$2}' $(MAKEFILE_LIST)

-include $(shell find build/obj -name '*.d' 2>/dev/null)
