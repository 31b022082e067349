/* config.h: what can be set, from one table (config.c) that serves the command line, the file, the environment, --help,
 * --check-config and --print-config. Precedence: file < environment (DCPD_STORAGE, DCPD_SHM_LIMIT …; lists divided by commas)
 * < command line. A list given at a higher level replaces the lower one's. An unknown key is an error. */
#pragma once
#include <jansson.h>
#include <stdio.h>
#include <sys/types.h>
#include "base/err.h"
#include "base/str.h"

enum { CONFIG_LIST_MAX = 64, CONFIG_PATH_MAX = 1024 };

struct config_list {
	char *items[CONFIG_LIST_MAX];
	uint32_t count;
};

/* A storage that has another one behind it: durable checkpoints are copied there (server/tier.h). */
struct config_tier {
	char storage[33], target[33];
	uint64_t behind;                       /* so many may wait, of a run if `newest`; 0: any number */
	bool newest;                           /* the newest first, and of a run no more than `behind`; else all, in order */
	bool background;                       /* pace of the copies */
};

struct config {
	/* the options of SURFACES */
	char *config_file, *state_dir;
	struct config_list storage;            /* "NAME=DIR" or "NAME=SCHEME://…", checked */
	struct config_list listen;             /* never empty: defaults are filled in */
	uint64_t workers;                      /* of a gang, at least 2 */
	uint64_t shm_limit;                    /* bytes */
	uint64_t device_limit;                 /* bytes of each GPU for device images; 0: as much as it has */
	uint64_t keep_jobs;                    /* records of finished jobs */
	int64_t keep_jobs_ms;
	char *allow_group;                     /* NULL: none */
	uint64_t file_mode;                    /* of files in storages; never 0 */
	char *file_group;                      /* NULL: as the directory gives it */
	gid_t file_gid;                        /* of file_group, or CONFIG_NO_GROUP; not an option */
	struct config_list storage_option;     /* "NAME.KEY=VALUE", checked: options of one storage; not one itself */
	struct config_list tier;               /* "NAME=STORAGE", "NAME.OPTION=VALUE" */
	struct config_list s3;                 /* "NAME.KEY=VALUE", checked (config_s3.c) */
	struct config_tier tiers[CONFIG_LIST_MAX];     /* of that, checked; not an option */
	uint32_t tier_count;
	struct config_list allowed_host;
	struct config_list webhook_allow;      /* networks, checked */
	char *tls_cert, *tls_key;              /* NULL: none */
	bool insecure_http;
	bool log_json;
	char *otlp_endpoint;                   /* NULL: no traces */
	char *cluster;                         /* etcd's servers, "URL,…"; NULL: a daemon by itself */
	char *node, *advertise;                /* its name in the cluster, and HOST:PORT where the others reach it; checked */
	char *cluster_prefix, *cluster_ca, *cluster_cert, *cluster_key, *cluster_user;
	int64_t cluster_ttl_ms;                /* of a node's lease */
	uint64_t neighbour_memory;             /* bytes for checkpoints of other nodes; 0: none are taken */
	int64_t neighbour_keep_ms;             /* a replica that no newer one has replaced goes after so long */
	char *web_root;                        /* NULL: the files inside the binary */
	bool check_config, print_config, help, version;
	char *doctor;                          /* "text", "json": what this host lacks, in this form; NULL: not asked */
	char *manual;                          /* "8", "5": the page to print; NULL: none */
	/* finer ones, in the same table */
	char *worker_path;                     /* dcpd-worker; default: beside this program, else in libexec */
	char *io_engine;                       /* auto, io_uring, threads */
	char *comm_listen;                     /* an address or an interface */
	int64_t comm_deadline_ms;              /* of one collective, and of a group's meeting */
	int64_t gang_idle_ms, lookup_idle_ms;
	int64_t stall_ms;                      /* no byte of progress for so long: the job's stage is `stalled` */
	int64_t stall_deadline_ms;             /* … and after so long it fails with storage_stalled */
	int64_t lookup_deadline_ms;
	int64_t drain_ms;
	int64_t lease_ms;                      /* of a state dict's rank */
	int64_t keep_sealed_ms;                /* a sealed generation whose owner is gone */
	uint64_t queue_max;                    /* waiting jobs; more are refused with too_many_jobs */
	uint64_t token_rate;                   /* requests a second, of each token; 0: no limit */
	uint64_t job_memory;                   /* for all workers of a job together */
	char *journal_file, *token_file, *tokens_file; /* $STATE/journal.db, $STATE/token, $STATE/tokens; not options */
	uint8_t from[64];                      /* enum config_source of each row of the table */
};

#define CONFIG_NO_GROUP ((gid_t)-1)

/* Access to what is made in a storage: files get `mode`, directories x as well where `mode` has r. */
struct config_access {
	mode_t mode;
	gid_t gid;                             /* CONFIG_NO_GROUP: as the directory gives it */
};

enum config_source { CONFIG_DEFAULT, CONFIG_FILE, CONFIG_ENV, CONFIG_ARGV };

/* env may be NULL (none). ERR_CONFIG names key and source. Makes nothing on disk. */
FALLIBLE enum err config_load(int argc, char *const *argv, char *const *env, struct config **out);
void config_free(struct config *c);
void config_print(const struct config *c, FILE *to);   /* `key = value` lines with where each comes from */
void config_help(FILE *to);
struct config_row {
	const char *key, *argument, *fallback, *doc;   /* argument: NULL: a flag; fallback: NULL: worked out, or none */
	bool repeats;
	bool is_command;                               /* it does something else than serve: not for the file */
};
bool config_row(uint32_t index, struct config_row *out);
/* dcpd(8) or dcpd.conf(5), as roff, of the table's rows. ERR_CONFIG: there is no such page. */
FALLIBLE enum err config_manual(const char *page, FILE *to);
/* Of a storage of the configuration, or of any other name: the general ones. Asks for groups: at start and reload only. */
FALLIBLE enum err config_access_of(const struct config *c, struct str storage, struct config_access *out);
/* Fills in what config_access_of() answers; called once all options are read. */
FALLIBLE enum err config_access_derive(struct config *c, bool is_service);
FALLIBLE enum err config_mode(struct str text, uint64_t *out);           /* "0640" */
FALLIBLE enum err config_tier_derive(struct config *c);
FALLIBLE enum err config_s3_derive(const struct config *c);
FALLIBLE enum err config_cluster_check(const struct config *c);
/* Of a node: can workers of other nodes connect to its own? Not if those listen on loopback, and the nodes are on several hosts. */
bool config_cluster_reaches_workers(const struct config *c);
bool config_is_loopback(const char *address);    /* HOST:PORT */
bool config_may_send_secret(const struct config *c, struct str url);     /* https, loopback, or --insecure-http here */
/* The options of a storage on S3, texts by their names; NULL: none is set. */
FALLIBLE enum err config_s3_options(const struct config *c, struct str storage, json_t **out);
/* --check-config: says what is wrong with the folders, sockets and files that it names, a line each. How many there are. */
unsigned config_check_paths(const struct config *c, FILE *to);
/* Divides "NAME=DIR", or "NAME=SCHEME://…", where *dir_out is all behind the '='. */
FALLIBLE enum err config_storage(const char *item, struct str *name_out, const char **dir_out);
/* "512", "64MiB", "1G"; "80%" only with percent_of != 0. */
FALLIBLE enum err config_bytes(struct str text, uint64_t percent_of, uint64_t *out);
/* "30s", "500ms", "10m", "1h", "30d". */
FALLIBLE enum err config_duration(struct str text, int64_t *ms_out);
/* For tests: every key of the table, in order; NULL beyond the last. */
const char *config_key(uint32_t index);
