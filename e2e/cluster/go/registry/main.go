// A registry of the distribution project, with its files and logins in folders: what is left of it without the
// storages of clouds, which would take minutes to compile. Reads its configuration from standard input and says
// on standard output where it listens.
package main

import (
	"context"
	"fmt"
	"log"
	"net"
	"net/http"
	"os"

	"github.com/distribution/distribution/v3/configuration"
	_ "github.com/distribution/distribution/v3/registry/auth/htpasswd"
	"github.com/distribution/distribution/v3/registry/handlers"
	_ "github.com/distribution/distribution/v3/registry/storage/driver/filesystem"
)

func main() {
	config, err := configuration.Parse(os.Stdin)
	if err != nil {
		log.Fatal(err)
	}
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		log.Fatal(err)
	}
	fmt.Println(listener.Addr().String())
	log.Fatal(http.Serve(listener, handlers.NewApp(context.Background(), config)))
}
